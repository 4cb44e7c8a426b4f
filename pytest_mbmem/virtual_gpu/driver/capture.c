/* CUDA graphs: which streams capture, what they are given meanwhile, and what launching a graph does.
 *
 * A capture belongs to the stream that began it; another stream joins by waiting for an event recorded in it, and the
 * allocators choose their pool by the capture that a stream is in. Work for a capturing stream is kept instead of done, and
 * done at each launch of the graph. Libraries that launch their kernels themselves (cuBLAS, cuDNN, NCCL) add no work here.
 * What breaks the rules of capturing gets CUDA's own error and makes the capture invalid. */
#include "virtual_gpu.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GLOBAL, THREAD_LOCAL, RELAXED }; /* modes, as CUDA numbers them */

struct vgpu_graph {
    int references;
    uint64_t count, room;
    vgpu_work *works;
    struct held {
        vgpu_user_object *object;
        uint64_t references;
        struct held *next;
    } *held;
};

typedef struct capture {
    uint64_t id;
    int mode, blocking, invalid, members;
    pthread_t thread;
    vgpu_stream *origin;
    vgpu_graph *graph;
    /* [a][b]: how much of what stream b was given comes before whatever stream a is given next */
    uint32_t before[VGPU_CAPTURE_STREAMS][VGPU_CAPTURE_STREAMS];
    struct capture *next;
} capture;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void lock_all(void) { pthread_mutex_lock(&lock); }
static void unlock_all(void) { pthread_mutex_unlock(&lock); }
/* a child forked while another thread holds the lock must not inherit it locked */
__attribute__((constructor)) static void survive_fork(void) { pthread_atfork(lock_all, unlock_all, unlock_all); }

static capture *captures; /* under way */
static int under_way;     /* how many; read without the lock, so that nobody pays who captures nothing */
static __thread int thread_mode = GLOBAL;

static int none_under_way(void) { return __atomic_load_n(&under_way, __ATOMIC_ACQUIRE) == 0; }

static capture *by_id(uint64_t id) {
    capture *c = captures;
    while (c && c->id != id) c = c->next;
    return id ? c : NULL;
}

/* NULL, 1 (legacy) and 2 (per thread) are the default streams, which cannot capture. */
static vgpu_stream *own(void *handle) { return (uintptr_t)handle > 2 ? handle : NULL; }
static capture *of_stream(void *handle) { return own(handle) ? by_id(own(handle)->capture) : NULL; }

static int refuse(capture *c, int status) {
    c->invalid = 1;
    return status;
}

/* --- graphs ---------------------------------------------------------------------------------------------------------- */

static void add(vgpu_graph *graph, vgpu_work work) {
    if (graph->count == graph->room) {
        graph->room = graph->room ? 2 * graph->room : 64;
        graph->works = realloc(graph->works, graph->room * sizeof work);
        if (!graph->works) abort();
    }
    graph->works[graph->count++] = work;
}

vgpu_graph *vgpu_graph_retain(vgpu_graph *graph) {
    __atomic_add_fetch(&graph->references, 1, __ATOMIC_RELAXED);
    return graph;
}

void vgpu_graph_release(vgpu_graph *graph) {
    if (!graph || __atomic_sub_fetch(&graph->references, 1, __ATOMIC_ACQ_REL)) return;
    for (struct held *h = graph->held, *next; h; h = next) {
        next = h->next;
        vgpu_user_object_release(h->object, h->references);
        free(h);
    }
    free(graph->works);
    free(graph);
}

uint64_t vgpu_graph_size(const vgpu_graph *graph) { return graph->count; }

static int perform(const vgpu_work *w) {
    switch (w->kind) {
    case VGPU_KERNEL: return vgpu_launch();
    case VGPU_COPY: return vgpu_copy_2d(w->to, w->to_pitch, w->from, w->from_pitch, w->width, w->height);
    case VGPU_FILL: return vgpu_fill(w->to, w->pattern, w->pattern_bytes, w->width);
    case VGPU_CALL: w->function(w->to); return VGPU_SUCCESS;
    case VGPU_RECORD:
        ((vgpu_event *)w->to)->recorded = 1;
        ((vgpu_event *)w->to)->capture = 0;
        return VGPU_SUCCESS;
    default: return VGPU_SUCCESS; /* VGPU_WAIT */
    }
}

int vgpu_graph_launch(const vgpu_graph *graph, void *stream) {
    int status = VGPU_SUCCESS;
    for (uint64_t i = 0; i < graph->count && status == VGPU_SUCCESS; i++) status = vgpu_do(stream, graph->works[i]);
    return status;
}

/* What a graph keeps alive for its user. */
struct vgpu_user_object {
    void *data;
    void (*destroy)(void *data);
    uint64_t references;
};

vgpu_user_object *vgpu_user_object_create(void *data, void (*destroy)(void *), uint64_t references) {
    vgpu_user_object *object = malloc(sizeof *object);
    if (!object) abort();
    *object = (vgpu_user_object){data, destroy, references};
    return object;
}

void vgpu_user_object_release(vgpu_user_object *object, uint64_t references) {
    if (__atomic_sub_fetch(&object->references, references, __ATOMIC_ACQ_REL)) return;
    object->destroy(object->data);
    free(object);
}

void vgpu_graph_hold(vgpu_graph *graph, vgpu_user_object *object, uint64_t references, int moved) {
    struct held *h = malloc(sizeof *h);
    if (!h) abort();
    if (!moved) __atomic_add_fetch(&object->references, references, __ATOMIC_RELAXED);
    *h = (struct held){object, references, graph->held};
    graph->held = h;
}

/* --- capturing ------------------------------------------------------------------------------------------------------- */

int vgpu_capture_begin(void *handle, int mode) {
    vgpu_stream *stream = own(handle);
    if (mode < GLOBAL || mode > RELAXED) return VGPU_INVALID_VALUE;
    if (!stream) return VGPU_CAPTURE_UNSUPPORTED;
    lock_all();
    int status = by_id(stream->capture) ? VGPU_ILLEGAL_STATE : VGPU_SUCCESS;
    if (status == VGPU_SUCCESS) {
        static uint64_t last_id;
        capture *c = calloc(1, sizeof *c);
        vgpu_graph *graph = calloc(1, sizeof *graph);
        if (!c || !graph) abort();
        graph->references = 1;
        c->id = ++last_id;
        c->mode = mode;
        c->blocking = !(stream->flags & 1); /* cudaStreamNonBlocking */
        c->thread = pthread_self();
        c->origin = stream;
        c->graph = graph;
        c->members = 1;
        c->next = captures;
        captures = c;
        stream->capture = c->id;
        stream->member = 0;
        __atomic_add_fetch(&under_way, 1, __ATOMIC_RELEASE);
    }
    unlock_all();
    return status;
}

/* How ending a capture goes; negative when it ends with that error, its sign turned. */
static int ending(capture *c, vgpu_stream *stream) {
    if (c->origin != stream) return refuse(c, VGPU_CAPTURE_UNMATCHED);
    if (c->mode != RELAXED && !pthread_equal(c->thread, pthread_self())) return VGPU_CAPTURE_WRONG_THREAD;
    if (c->invalid) return -VGPU_CAPTURE_INVALIDATED;
    for (int other = 1; other < c->members; other++)
        if (c->before[0][other] < c->before[other][other]) return -VGPU_CAPTURE_UNJOINED;
    return VGPU_SUCCESS;
}

int vgpu_capture_end(void *handle, vgpu_graph **graph) {
    vgpu_graph *dropped = NULL;
    *graph = NULL;
    lock_all();
    capture *c = of_stream(handle);
    int status = c ? ending(c, handle) : VGPU_ILLEGAL_STATE;
    if (status <= 0) {
        capture **link = &captures;
        while (*link != c) link = &(*link)->next;
        *link = c->next;
        __atomic_sub_fetch(&under_way, 1, __ATOMIC_RELEASE);
        *(status == VGPU_SUCCESS ? graph : &dropped) = c->graph;
        free(c);
    }
    unlock_all();
    vgpu_graph_release(dropped);
    return status < 0 ? -status : status;
}

int vgpu_capture_status(void *handle, uint64_t *id, vgpu_graph **graph) {
    int status = 0; /* cudaStreamCaptureStatusNone, Active, Invalidated */
    *id = 0;
    *graph = NULL;
    if (none_under_way()) return status;
    lock_all();
    capture *c = of_stream(handle);
    if (c) {
        status = c->invalid ? 2 : 1;
        *id = c->id;
        *graph = c->graph;
    }
    unlock_all();
    return status;
}

int vgpu_exchange_capture_mode(int *mode) {
    int before = thread_mode;
    if (*mode < GLOBAL || *mode > RELAXED) return VGPU_INVALID_VALUE;
    thread_mode = *mode;
    *mode = before;
    return VGPU_SUCCESS;
}

/* --- what capturing forbids ------------------------------------------------------------------------------------------ */

int vgpu_unsafe(void) {
    int status = VGPU_SUCCESS;
    if (none_under_way() || thread_mode == RELAXED) return status;
    lock_all();
    for (capture *c = captures; c; c = c->next) {
        int here = pthread_equal(c->thread, pthread_self());
        if (here ? c->mode != RELAXED : thread_mode == GLOBAL && c->mode == GLOBAL)
            status = refuse(c, VGPU_CAPTURE_UNSUPPORTED);
    }
    unlock_all();
    return status;
}

int vgpu_ask_stream(void *handle) {
    int status = VGPU_SUCCESS;
    if (none_under_way()) return status;
    lock_all();
    capture *c = of_stream(handle);
    if (c) status = refuse(c, VGPU_CAPTURE_UNSUPPORTED);
    unlock_all();
    return status;
}

int vgpu_ask_device(int device) {
    int status = VGPU_SUCCESS;
    if (none_under_way()) return status;
    lock_all();
    for (capture *c = captures; c; c = c->next)
        if (c->origin->device == device) status = refuse(c, VGPU_CAPTURE_UNSUPPORTED);
    unlock_all();
    return status;
}

int vgpu_ask_event(const vgpu_event *event) {
    if (!event) return VGPU_INVALID_HANDLE;
    if (!event->capture) return vgpu_unsafe();
    lock_all();
    capture *c = by_id(event->capture);
    if (c) refuse(c, VGPU_CAPTURED_EVENT);
    unlock_all();
    return VGPU_CAPTURED_EVENT;
}

/* --- work and order between streams ---------------------------------------------------------------------------------- */

/* Whether the stream may be given work now. `*into` is the capture that the work goes to; NULL: it is done. */
static int admit(void *handle, capture **into) {
    *into = of_stream(handle);
    if (*into) return (*into)->invalid ? VGPU_CAPTURE_INVALIDATED : VGPU_SUCCESS;
    if ((uintptr_t)handle > 1) return VGPU_SUCCESS;
    for (capture *c = captures; c; c = c->next) /* the legacy stream waits for all blocking streams */
        if (c->blocking) return refuse(c, VGPU_CAPTURE_IMPLICIT);
    return VGPU_SUCCESS;
}

int vgpu_do(void *stream, vgpu_work work) {
    if (none_under_way()) return perform(&work);
    capture *c;
    lock_all();
    int status = admit(stream, &c);
    if (status == VGPU_SUCCESS && c) {
        int member = own(stream)->member;
        c->before[member][member]++;
        add(c->graph, work);
    }
    unlock_all();
    return status || c ? status : perform(&work);
}

int vgpu_event_record(vgpu_event *event, void *stream) {
    if (!event) return VGPU_INVALID_HANDLE;
    capture *c = NULL;
    int status = VGPU_SUCCESS;
    if (!none_under_way()) {
        lock_all();
        status = admit(stream, &c);
        if (status == VGPU_SUCCESS && c) memcpy(event->before, c->before[own(stream)->member], sizeof event->before);
        unlock_all();
    }
    if (status) return status;
    event->recorded = 1;
    event->capture = c ? c->id : 0;
    return status;
}

static int join(capture *c, vgpu_stream *stream) {
    if (c->members == VGPU_CAPTURE_STREAMS) return refuse(c, vgpu_unsupported("a CUDA graph of more than 64 streams"));
    stream->capture = c->id;
    stream->member = c->members++;
    return VGPU_SUCCESS;
}

int vgpu_stream_wait(void *handle, const vgpu_event *event) {
    if (!event) return VGPU_INVALID_HANDLE;
    if (!event->recorded || (none_under_way() && !event->capture)) return VGPU_SUCCESS;
    lock_all();
    capture *of_event = by_id(event->capture), *c = NULL;
    int status = admit(handle, &c);
    if (status == VGPU_SUCCESS && of_event && of_event->invalid) status = VGPU_CAPTURE_INVALIDATED;
    if (status == VGPU_SUCCESS && event->capture && !of_event) status = VGPU_CAPTURED_EVENT;
    if (status == VGPU_SUCCESS && c && c != of_event) {
        status = refuse(c, of_event ? VGPU_CAPTURE_MERGE : VGPU_CAPTURE_ISOLATION);
    } else if (status == VGPU_SUCCESS && of_event) {
        vgpu_stream *stream = own(handle);
        if (!stream) status = refuse(of_event, VGPU_CAPTURE_IMPLICIT);
        else if (!c) status = join(of_event, stream);
        for (int i = 0; i < VGPU_CAPTURE_STREAMS && status == VGPU_SUCCESS; i++) {
            uint32_t *before = &of_event->before[stream->member][i];
            if (*before < event->before[i]) *before = event->before[i];
        }
    }
    unlock_all();
    return status;
}
