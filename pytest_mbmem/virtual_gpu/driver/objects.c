/* Contexts, streams, events and kernel launches: everything is done at once and in the order of the calls, except where
 * a stream captures (capture.c). */
#include "virtual_gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t launches[VGPU_MAX_DEVICES];
static int has_context[VGPU_MAX_DEVICES];
static uint64_t last_handle = 0x10000, last_stream_id = 2;
static __thread int current_device;

/* A context is the address of its device's flag: distinct, and told apart from anything else. */
uint64_t vgpu_context(int device) { return (uint64_t)(uintptr_t)&has_context[device]; }

int vgpu_context_device(uint64_t context) {
    uint64_t offset = context - vgpu_context(0);
    return offset < sizeof has_context ? (int)(offset / sizeof *has_context) : -1;
}

int vgpu_has_context(int device) { return __atomic_load_n(&has_context[device], __ATOMIC_RELAXED); }

void vgpu_open_context(int device) { __atomic_store_n(&has_context[device], 1, __ATOMIC_RELAXED); }

int vgpu_current_device(void) { return current_device; }

int vgpu_set_device(int device) {
    const vgpu_config *config = vgpu_configuration();
    if (config->device_count == 0) return VGPU_NO_DEVICE;
    if (device < 0 || device >= config->device_count) return VGPU_INVALID_DEVICE;
    current_device = device;
    return VGPU_SUCCESS;
}

int vgpu_enter(void) {
    if (current_device >= vgpu_configuration()->device_count) return -1;
    vgpu_open_context(current_device);
    return current_device;
}

uint64_t vgpu_new_handle(void) { return __atomic_add_fetch(&last_handle, 16, __ATOMIC_RELAXED); }

int vgpu_stream_create(unsigned flags, int priority, vgpu_stream **stream) {
    int device = vgpu_enter();
    if (device < 0) return VGPU_NO_DEVICE;
    if (!stream) return VGPU_INVALID_VALUE;
    *stream = malloc(sizeof **stream);
    if (!*stream) abort();
    uint64_t id = __atomic_add_fetch(&last_stream_id, 1, __ATOMIC_RELAXED);
    **stream = (vgpu_stream){.device = device, .priority = priority, .flags = flags, .id = id};
    return VGPU_SUCCESS;
}

void vgpu_stream_destroy(vgpu_stream *stream) {
    if ((uintptr_t)stream > 2) free(stream);
}

vgpu_stream vgpu_stream_of(void *handle) {
    uintptr_t value = (uintptr_t)handle; /* NULL, 1 (legacy) and 2 (per thread) are the default streams */
    return value > 2 ? *(vgpu_stream *)handle : (vgpu_stream){.device = current_device, .id = value};
}

int vgpu_event_create(int timed, vgpu_event **event) {
    int device = vgpu_enter();
    if (device < 0) return VGPU_NO_DEVICE;
    if (!event) return VGPU_INVALID_VALUE;
    *event = malloc(sizeof **event);
    if (!*event) abort();
    **event = (vgpu_event){.device = device, .timed = timed};
    return VGPU_SUCCESS;
}

int vgpu_event_destroy(vgpu_event *event) {
    free(event);
    return event ? VGPU_SUCCESS : VGPU_INVALID_HANDLE;
}

int vgpu_event_elapsed(const vgpu_event *start, const vgpu_event *end, float *milliseconds) {
    if (!start || !end || !start->timed || !end->timed || !start->recorded || !end->recorded)
        return VGPU_INVALID_HANDLE;
    if (start->capture || end->capture) return VGPU_CAPTURED_EVENT;
    if (!milliseconds) return VGPU_INVALID_VALUE;
    *milliseconds = vgpu_next_elapsed();
    return VGPU_SUCCESS;
}

int vgpu_launch(void) {
    int device = vgpu_enter();
    if (device < 0) return VGPU_NO_DEVICE;
    vgpu_meet_fault(device, __atomic_add_fetch(&launches[device], 1, __ATOMIC_RELAXED));
    return VGPU_SUCCESS;
}

uint64_t vgpu_launches(int device) { return __atomic_load_n(&launches[device], __ATOMIC_RELAXED); }

int vgpu_occupancy(int threads_per_block, uint64_t shared_bytes) {
    const vgpu_config *config = vgpu_configuration();
    if (threads_per_block <= 0 || threads_per_block > 1024) return 0;
    int blocks = config->threads_per_sm / ((threads_per_block + 31) / 32 * 32);
    int by_shared = (int)((uint64_t)config->shared_bytes_per_sm / (shared_bytes + 1024)); /* 1 KiB is reserved */
    int most = config->threads_per_sm >= 2048 ? 32 : 24;
    if (blocks > by_shared) blocks = by_shared;
    return blocks > most ? most : blocks;
}

int vgpu_unsupported(const char *what) {
    static const char *said[32];
    for (size_t i = 0; i < sizeof said / sizeof *said; i++) {
        if (said[i] && strcmp(said[i], what) == 0) break;
        if (said[i]) continue;
        said[i] = what; /* `what` is always a literal; two threads at once say it twice at worst */
        fprintf(stderr, "pytest-mbmem virtual GPU: %s is not possible here\n", what);
        break;
    }
    return VGPU_NOT_SUPPORTED;
}
