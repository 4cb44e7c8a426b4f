/* The one place that holds what the virtual GPUs of this process are and hold.
 *
 * libvirtual_gpu.so (config.c, memory.c, objects.c, capture.c, staged.c) owns all state. libcudart, libcuda and
 * libnvidia-ml are thin: each translates its own interface into the calls below. Every status is a number that the CUDA
 * runtime and the driver API share (0 success, 1 invalid value, 2 out of memory, ...), so both pass it on unchanged.
 */
#ifndef VIRTUAL_GPU_H
#define VIRTUAL_GPU_H

#include <stddef.h>
#include <stdint.h>

#define VGPU_MAX_DEVICES 16
#define VGPU_UUID_TEXT 41 /* bytes */

enum vgpu_status {
    VGPU_SUCCESS = 0,
    VGPU_INVALID_VALUE = 1,
    VGPU_OUT_OF_MEMORY = 2,
    VGPU_INVALID_SYMBOL = 13,
    VGPU_NO_DEVICE = 100,
    VGPU_INVALID_DEVICE = 101,
    VGPU_INVALID_CONTEXT = 201,
    VGPU_INVALID_HANDLE = 400,
    VGPU_ILLEGAL_STATE = 401,
    VGPU_NOT_FOUND = 500,
    VGPU_PEER_ALREADY_ENABLED = 704,
    VGPU_PEER_NOT_ENABLED = 705,
    VGPU_HOST_ALREADY_REGISTERED = 712,
    VGPU_HOST_NOT_REGISTERED = 713,
    VGPU_NOT_SUPPORTED = 801,
    VGPU_CAPTURE_UNSUPPORTED = 900,
    VGPU_CAPTURE_INVALIDATED = 901,
    VGPU_CAPTURE_MERGE = 902,
    VGPU_CAPTURE_UNMATCHED = 903,
    VGPU_CAPTURE_UNJOINED = 904,
    VGPU_CAPTURE_ISOLATION = 905,
    VGPU_CAPTURE_IMPLICIT = 906,
    VGPU_CAPTURED_EVENT = 907,
    VGPU_CAPTURE_WRONG_THREAD = 908,
};

/* --- staged.c: what tests stage so that virtual GPUs can stand in for real ones ------------------------------------ */

#define VGPU_MAX_FOREIGN 8
#define VGPU_MAX_ELAPSED 64

typedef struct { /* a process of somebody else on a device */
    int installed; /* the device, by NVML's number */
    unsigned pid;
    uint64_t bytes, after_launches; /* it is there once this process has launched so many kernels */
} vgpu_foreign;

typedef struct {
    int cuda_version, foreign_count, elapsed_count;
    vgpu_foreign foreign[VGPU_MAX_FOREIGN];
    float elapsed[VGPU_MAX_ELAPSED]; /* milliseconds */
    char fault[16];                  /* "die", "hang", "lose peer" or nothing */
    int fault_installed;
    uint64_t fault_after_launches; /* of this process on that device */
} vgpu_staged;

/* From the environment; nonzero, and a line on stderr, for a variable that cannot be read. */
int vgpu_read_staged(vgpu_staged *staged);

/* The foreign process number `index` (from 0) that is on a device now; NULL when there are no more. */
const vgpu_foreign *vgpu_foreign_process(const vgpu_staged *staged, int installed, int index);
uint64_t vgpu_foreign_bytes(const vgpu_staged *staged, int installed);

int vgpu_cuda_version(void);     /* that the driver is for: 13000 is CUDA 13.0; fixes nothing */
float vgpu_next_elapsed(void); /* milliseconds; NaN when no times are staged */
void vgpu_meet_fault(int device, uint64_t launches);
int vgpu_peer_lost(void);

/* --- config.c: what the GPUs pretend to be; all devices are alike ------------------------------------------------- */

typedef struct {
    int installed_count;                 /* what NVML sees; 0 when the environment describes no GPU */
    int device_count;                    /* what CUDA sees: those that CUDA_VISIBLE_DEVICES leaves */
    int installed[VGPU_MAX_DEVICES];     /* NVML's number of each of CUDA's devices */
    char name[96];
    uint64_t capacity;      /* bytes, as cudaMemGetInfo's total */
    uint64_t context_bytes; /* bytes of the capacity that the CUDA context takes from each process */
    int major, minor;       /* compute capability */
    int sm_count, threads_per_sm, l2_bytes;
    int shared_bytes_per_sm, shared_bytes_per_block_optin;
    vgpu_staged staged;
} vgpu_config;

/* The configuration, read from the environment at the first call and fixed from then on. */
const vgpu_config *vgpu_configuration(void);

/* The configuration as it would be now, without fixing it: for NVML, which is asked before a fork server forks. */
vgpu_config vgpu_peek_configuration(void);

/* A device attribute by its number (CUdevice_attribute and cudaDeviceAttr share numbers); 0 for features it lacks. */
int vgpu_attribute(int attribute, int device, int *value);

/* By NVML's number. */
void vgpu_pci_bus_id(int installed, char *text, size_t size); /* "00000000:01:00.0" */
void vgpu_uuid(int installed, unsigned char uuid[16]);
void vgpu_uuid_text(int installed, char text[VGPU_UUID_TEXT]); /* "GPU-01000000-6d62-..." */

/* Names and text of a status; NULL for a number not known here. */
const char *vgpu_runtime_error_name(int status);
const char *vgpu_driver_error_name(int status);
const char *vgpu_error_text(int status);

/* --- memory.c: addresses, accounting and data --------------------------------------------------------------------- */

#define VGPU_GRANULARITY (2ull << 20)    /* bytes; every device allocation is rounded up to it */
#define VGPU_CARRIED_BYTES (1ull << 20)  /* larger transfers to or within devices lose their data: it reads as zeros */
#define VGPU_POOL_ALIGNMENT 512ull       /* bytes; of cudaMallocAsync */

enum vgpu_kind { VGPU_UNKNOWN, VGPU_DEVICE, VGPU_HOST, VGPU_MANAGED };

typedef struct {
    enum vgpu_kind kind;
    int device;
    uint64_t start, size; /* of the whole allocation */
} vgpu_pointer;

int vgpu_malloc(int device, uint64_t bytes, uint64_t *address);
int vgpu_pool_malloc(int device, uint64_t bytes, uint64_t *address);
int vgpu_free(uint64_t address);
void vgpu_memory_info(int device, uint64_t *free_bytes, uint64_t *total_bytes);

typedef struct {
    uint64_t release_threshold, reserved, reserved_high, used, used_high; /* bytes */
} vgpu_pool;
vgpu_pool vgpu_pool_state(int device);
void vgpu_pool_set_threshold(int device, uint64_t bytes);
void vgpu_pool_reset_high(int device);
void vgpu_pool_trim(int device, uint64_t keep_bytes);
void vgpu_synchronize(int device); /* everything is done at once; what a synchronisation does is trim the pool */

int vgpu_host_alloc(uint64_t bytes, enum vgpu_kind kind, void **pointer);
int vgpu_host_free(void *pointer);
int vgpu_host_register(void *pointer, uint64_t bytes);
int vgpu_host_unregister(void *pointer);
vgpu_pointer vgpu_find(uint64_t address);

/* Virtual memory management. Physical memory is charged from create until it is neither referenced nor mapped. */
int vgpu_reserve(uint64_t bytes, uint64_t alignment, uint64_t *address);
int vgpu_unreserve(uint64_t address, uint64_t bytes);
int vgpu_physical_create(int device, uint64_t bytes, uint64_t *handle);
int vgpu_physical_release(uint64_t handle);
int vgpu_physical_retain(uint64_t address, uint64_t *handle);
int vgpu_physical_device(uint64_t handle);
int vgpu_map(uint64_t address, uint64_t bytes, uint64_t handle);
int vgpu_unmap(uint64_t address, uint64_t bytes);
int vgpu_set_access(uint64_t address, uint64_t bytes);

/* Any mixture of host and device memory. */
int vgpu_copy_2d(void *to, uint64_t to_pitch, const void *from, uint64_t from_pitch, uint64_t width, uint64_t height);
/* `pattern` of 1, 2 or 4 bytes, `count` times. */
int vgpu_fill(void *to, uint32_t pattern, int pattern_bytes, uint64_t count);

typedef struct { /* counters.py reads this structure: keep both in step */
    uint64_t kernel_launches;
    uint64_t allocations, frees, failed_allocations; /* of device memory: cudaMalloc, cuMemCreate, growth of a pool */
    uint64_t bytes_used, bytes_peak;                 /* without the context */
    uint64_t zero_reads; /* copies to the host that brought zeros alone: most likely what a kernel would have computed */
    uint64_t bytes_to_host, bytes_to_device;         /* that copies moved between the device and host memory */
    uint64_t unanswered_reads; /* copies to the host that no answer was given for, whatever they brought */
} vgpu_counters;
int vgpu_read_counters(int device, vgpu_counters *counters);

/* What a kernel would have computed, stated by the host: the next copy of exactly `count` bytes from the device address
 * `from` (NULL: from any) to the host brings these bytes instead. First given, first taken; each is taken once. */
void vgpu_answer_read(const void *from, const void *bytes, uint64_t count);
uint64_t vgpu_answers_left(void);  /* given and not yet taken */
void vgpu_forget_answers(void);

/* Have this called after every copy to the host that no answer was given for, with its bytes, on the thread that asked
 * for the copy; NULL: nothing any more. */
typedef void (*vgpu_on_read)(uint64_t bytes);
void vgpu_tell_reads(vgpu_on_read call);

/* --- objects.c: the calling thread's device, streams, events, kernels --------------------------------------------- */

int vgpu_current_device(void); /* of the calling thread; does not create a context */
int vgpu_set_device(int device);
int vgpu_has_context(int device);
void vgpu_open_context(int device); /* creates the primary context */
int vgpu_enter(void); /* the current device, whose primary context now exists; negative when there is no device */
uint64_t vgpu_context(int device);
int vgpu_context_device(uint64_t context); /* negative for what is no context of ours */

uint64_t vgpu_new_handle(void); /* distinct, never NULL */

typedef struct {
    int device, priority;
    unsigned flags;
    uint64_t id;
    uint64_t capture; /* the last one that it was in; 0: none */
    int member;       /* its number among the streams of that capture */
} vgpu_stream;
int vgpu_stream_create(unsigned flags, int priority, vgpu_stream **stream);
void vgpu_stream_destroy(vgpu_stream *stream);
vgpu_stream vgpu_stream_of(void *handle); /* takes the default streams' handles too */

#define VGPU_CAPTURE_STREAMS 64
typedef struct {
    int device, timed, recorded;
    uint64_t capture;                      /* that it was last recorded in; 0: in none */
    uint32_t before[VGPU_CAPTURE_STREAMS]; /* how much of each of its streams' work then came before it */
} vgpu_event;
int vgpu_event_create(int timed, vgpu_event **event);
int vgpu_event_destroy(vgpu_event *event);
int vgpu_event_elapsed(const vgpu_event *start, const vgpu_event *end, float *milliseconds);

int vgpu_launch(void); /* count a kernel on the current device; it computes nothing */
uint64_t vgpu_launches(int device);
int vgpu_occupancy(int threads_per_block, uint64_t shared_bytes); /* blocks per SM */

/* --- capture.c: CUDA graphs; streams are handles, those of the default streams included ------------------------------ */

enum vgpu_work_kind { VGPU_KERNEL, VGPU_COPY, VGPU_FILL, VGPU_CALL, VGPU_RECORD, VGPU_WAIT };
typedef struct { /* what a stream is given to do; the fields that its kind uses */
    enum vgpu_work_kind kind;
    void *to;         /* memory to write, the function's argument, or the event to record */
    const void *from; /* memory to read */
    uint64_t to_pitch, from_pitch, width, height; /* of a copy; a fill has `width` patterns */
    uint32_t pattern;
    int pattern_bytes;
    void (*function)(void *argument); /* of the host */
} vgpu_work;
int vgpu_do(void *stream, vgpu_work work); /* now, or at each launch of the graph that the stream captures */

typedef struct vgpu_graph vgpu_graph;
vgpu_graph *vgpu_graph_retain(vgpu_graph *graph);
void vgpu_graph_release(vgpu_graph *graph);
uint64_t vgpu_graph_size(const vgpu_graph *graph); /* pieces of work */
int vgpu_graph_launch(const vgpu_graph *graph, void *stream);

typedef struct vgpu_user_object vgpu_user_object;
vgpu_user_object *vgpu_user_object_create(void *data, void (*destroy)(void *), uint64_t references);
void vgpu_user_object_release(vgpu_user_object *object, uint64_t references);
/* `moved`: the graph takes the references from the caller instead of adding them. */
void vgpu_graph_hold(vgpu_graph *graph, vgpu_user_object *object, uint64_t references, int moved);

/* Modes and statuses are numbered as CUDA's. */
int vgpu_capture_begin(void *stream, int mode);
int vgpu_capture_end(void *stream, vgpu_graph **graph); /* which the caller releases */
int vgpu_capture_status(void *stream, uint64_t *id, vgpu_graph **graph);
int vgpu_exchange_capture_mode(int *mode); /* of the calling thread */

/* Each fails, and makes captures invalid, where CUDA forbids the call while they are under way. */
int vgpu_unsafe(void); /* before what CUDA calls potentially unsafe */
int vgpu_ask_stream(void *stream); /* whether all is done, or to wait for it */
int vgpu_ask_device(int device);
int vgpu_ask_event(const vgpu_event *event);
int vgpu_event_record(vgpu_event *event, void *stream);
int vgpu_stream_wait(void *stream, const vgpu_event *event);

/* Say once on stderr what a virtual GPU cannot do, and return VGPU_NOT_SUPPORTED. */
int vgpu_unsupported(const char *what);

#endif
