/* What tests stage, by environment variables that only they set: virtual GPUs that stand in for real ones have foreign
 * processes on them, an older driver, times between events, and faults. Without the variables there is none of it. */
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <cuda.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int unread(const char *variable) {
    fprintf(stderr, "pytest-mbmem virtual GPU: %s=%s cannot be read, so there is no GPU\n", variable, getenv(variable));
    return 1;
}

/* "device:pid:bytes:after_launches,..." */
static int read_foreign(const char *text, vgpu_staged *staged) {
    for (; *text; text += *text == ',') {
        vgpu_foreign f;
        int length = 0;
        sscanf(text, "%d:%u:%" SCNu64 ":%" SCNu64 "%n", &f.installed, &f.pid, &f.bytes, &f.after_launches, &length);
        text += length;
        if (!length || (*text && *text != ',') || staged->foreign_count == VGPU_MAX_FOREIGN) return 1;
        staged->foreign[staged->foreign_count++] = f;
    }
    return 0;
}

/* "120 40 41 40" */
static int read_elapsed(const char *text, vgpu_staged *staged) {
    while (*text) {
        char *end;
        if (staged->elapsed_count == VGPU_MAX_ELAPSED) return 1;
        staged->elapsed[staged->elapsed_count++] = strtof(text, &end);
        if (end == text) return 1;
        text = end;
    }
    return 0;
}

/* "kind:device:after_launches" */
static int read_fault(const char *text, vgpu_staged *staged) {
    int length = 0;
    sscanf(text, "%15[a-z ]:%d:%" SCNu64 "%n", staged->fault, &staged->fault_installed, &staged->fault_after_launches,
           &length);
    if (!length || text[length]) return 1;
    return strcmp(staged->fault, "die") && strcmp(staged->fault, "hang") && strcmp(staged->fault, "lose peer");
}

/* "12.4" */
static int read_cuda(const char *text, vgpu_staged *staged) {
    int major, minor, length = 0;
    sscanf(text, "%d.%d%n", &major, &minor, &length);
    if (!length || text[length]) return 1;
    staged->cuda_version = major * 1000 + minor * 10;
    return 0;
}

int vgpu_read_staged(vgpu_staged *staged) {
    static const struct {
        const char *variable;
        int (*read)(const char *text, vgpu_staged *staged);
    } variables[] = {
        {"MBMEM_GPU_FOREIGN", read_foreign},
        {"MBMEM_GPU_ELAPSED_MS", read_elapsed},
        {"MBMEM_GPU_FAULT", read_fault},
        {"MBMEM_GPU_DRIVER_CUDA", read_cuda},
    };
    *staged = (vgpu_staged){.cuda_version = CUDA_VERSION};
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++) {
        const char *text = getenv(variables[i].variable);
        if (text && variables[i].read(text, staged)) return unread(variables[i].variable);
    }
    return 0;
}

const vgpu_foreign *vgpu_foreign_process(const vgpu_staged *staged, int installed, int index) {
    if (!staged->foreign_count) return NULL; /* asked at every allocation */
    uint64_t launches = 0;
    for (int device = 0; device < VGPU_MAX_DEVICES; device++) launches += vgpu_launches(device);
    for (int i = 0; i < staged->foreign_count; i++) {
        const vgpu_foreign *f = &staged->foreign[i];
        if (f->installed == installed && launches >= f->after_launches && index-- == 0) return f;
    }
    return NULL;
}

uint64_t vgpu_foreign_bytes(const vgpu_staged *staged, int installed) {
    uint64_t bytes = 0;
    const vgpu_foreign *f;
    for (int i = 0; (f = vgpu_foreign_process(staged, installed, i)); i++) bytes += f->bytes;
    return bytes;
}

int vgpu_cuda_version(void) {
    vgpu_config config = vgpu_peek_configuration();
    return config.installed_count ? config.staged.cuda_version : CUDA_VERSION;
}

float vgpu_next_elapsed(void) {
    static int next;
    const vgpu_staged *staged = &vgpu_configuration()->staged;
    /* nothing ran, so no number is true; NaN stays visible in whatever is computed from it */
    if (!staged->elapsed_count) return NAN;
    int i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
    return staged->elapsed[i < staged->elapsed_count ? i : staged->elapsed_count - 1]; /* the last one is repeated */
}

static int peer_lost;

int vgpu_peer_lost(void) { return __atomic_load_n(&peer_lost, __ATOMIC_RELAXED); }

void vgpu_meet_fault(int device, uint64_t launches) {
    const vgpu_config *config = vgpu_configuration();
    const vgpu_staged *staged = &config->staged;
    if (!*staged->fault || launches != staged->fault_after_launches + 1) return;
    if (config->installed[device] != staged->fault_installed) return;
    if (*staged->fault == 'd') kill(getpid(), SIGKILL);
    while (*staged->fault == 'h') pause();
    __atomic_store_n(&peer_lost, 1, __ATOMIC_RELAXED);
}
