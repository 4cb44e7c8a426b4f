/* libnvidia-ml: NVML as torch and pynvml ask it. NVML is asked before a fork server forks, so it never fixes the
 * configuration. No pip package has nvml.h: the few structures are declared here as NVIDIA documents them. */
#include "virtual_gpu.h"

#include <cuda.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

typedef struct { /* nvmlMemory_t */
    unsigned long long total, free, used;
} memory_info;
typedef struct { /* nvmlMemory_v2_t */
    unsigned int version;
    unsigned long long total, reserved, free, used;
} memory_info_v2;
typedef struct { /* nvmlProcessInfo_v1_t; later ones have two more fields */
    unsigned int pid;
    unsigned long long used;
} process_v1;
typedef struct { /* nvmlProcessInfo_v2_t */
    unsigned int pid;
    unsigned long long used;
    unsigned int gpu_instance, compute_instance;
} process_v2;

/* A device handle is its number, from 1. */
static int index_of(void *handle) { return (int)(uintptr_t)handle - 1; }
static int give_handle(unsigned int index, void **handle) {
    if (index >= (unsigned int)vgpu_peek_configuration().installed_count) return INVALID_ARGUMENT;
    *handle = (void *)(uintptr_t)(index + 1);
    return SUCCESS;
}
static int give_text(const char *text, char *to, unsigned int size) {
    if (strlen(text) >= size) return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

int nvmlInit(void) { return SUCCESS; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    return SUCCESS;
}
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int status) {
    switch (status) {
    case SUCCESS: return "Success";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *version, unsigned int size) { return give_text("0.0-virtual", version, size); }
int nvmlSystemGetNVMLVersion(char *version, unsigned int size) { return give_text("0.0-virtual", version, size); }
int nvmlSystemGetCudaDriverVersion(int *version) {
    *version = CUDA_VERSION;
    return SUCCESS;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

int nvmlDeviceGetCount(unsigned int *count) {
    *count = (unsigned int)vgpu_peek_configuration().installed_count;
    return SUCCESS;
}
int nvmlDeviceGetCount_v2(unsigned int *count) { return nvmlDeviceGetCount(count); }
int nvmlDeviceGetHandleByIndex(unsigned int index, void **handle) { return give_handle(index, handle); }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle) { return give_handle(index, handle); }
int nvmlDeviceGetIndex(void *handle, unsigned int *index) {
    *index = (unsigned int)index_of(handle);
    return SUCCESS;
}
int nvmlDeviceGetMinorNumber(void *handle, unsigned int *minor) { return nvmlDeviceGetIndex(handle, minor); }

int nvmlDeviceGetUUID(void *handle, char *text, unsigned int size) {
    unsigned char b[16];
    char full[48];
    vgpu_uuid(index_of(handle), b);
    snprintf(full, sizeof full, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1],
             b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
    return give_text(full, text, size);
}
int nvmlDeviceGetHandleByUUID(const char *wanted, void **handle) {
    char uuid[48];
    for (unsigned int i = 0; give_handle(i, handle) == SUCCESS; i++)
        if (nvmlDeviceGetUUID(*handle, uuid, sizeof uuid) == SUCCESS && strcmp(uuid, wanted) == 0) return SUCCESS;
    return NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *wanted, void **handle) {
    char id[32];
    for (unsigned int i = 0; give_handle(i, handle) == SUCCESS; i++) {
        vgpu_pci_bus_id((int)i, id, sizeof id);
        /* the runtime's form has a domain of four digits, NVML's own one of eight */
        if (strcasecmp(wanted, id) == 0 || strcasecmp(wanted, id + 4) == 0) return SUCCESS;
    }
    return NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId(const char *wanted, void **handle) {
    return nvmlDeviceGetHandleByPciBusId_v2(wanted, handle);
}

int nvmlDeviceGetName(void *handle, char *name, unsigned int size) {
    (void)handle;
    vgpu_config config = vgpu_peek_configuration();
    return give_text(config.name, name, size);
}
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    (void)handle;
    vgpu_config config = vgpu_peek_configuration();
    *major = config.major;
    *minor = config.minor;
    return SUCCESS;
}

/* Bytes that this process holds; 0 without a context, which counts once it exists. */
static uint64_t used_bytes(void *handle) {
    vgpu_config config = vgpu_peek_configuration();
    vgpu_counters counters;
    for (int device = 0; device < config.device_count; device++)
        if (config.installed[device] == index_of(handle) && vgpu_has_context(device) &&
            vgpu_read_counters(device, &counters) == 0)
            return counters.bytes_used + config.context_bytes;
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, memory_info *info) {
    info->total = vgpu_peek_configuration().capacity;
    info->used = used_bytes(handle);
    info->free = info->total - info->used;
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_info_v2 *info) {
    info->total = vgpu_peek_configuration().capacity;
    info->used = used_bytes(handle);
    info->free = info->total - info->used;
    info->reserved = 0;
    return SUCCESS;
}

/* The only process on a virtual GPU is the caller. */
int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned int *count, process_v1 *processes) {
    unsigned int room = *count;
    *count = used_bytes(handle) > 0;
    if (*count == 0) return SUCCESS;
    if (room == 0) return INSUFFICIENT_SIZE;
    processes[0] = (process_v1){(unsigned int)getpid(), used_bytes(handle)};
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned int *count, process_v2 *processes) {
    int status = nvmlDeviceGetComputeRunningProcesses(handle, count, (process_v1 *)processes);
    if (status == SUCCESS && *count) processes[0].gpu_instance = processes[0].compute_instance = ~0u;
    return status;
}
int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned int *count, process_v2 *processes) {
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, processes);
}

/* No NVLink topology, no fabric: whoever asks finds the plain case. */
int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned int link, void *type) {
    (void)handle, (void)link, (void)type;
    return NOT_SUPPORTED;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned int link, void *info) {
    (void)handle, (void)link, (void)info;
    return NOT_SUPPORTED;
}
int nvmlDeviceGetGpuFabricInfoV(void *handle, void *info) {
    (void)handle, (void)info;
    return NOT_SUPPORTED;
}
int nvmlDeviceGetP2PStatus(void *handle, void *peer, int capability, int *status) {
    (void)handle, (void)peer, (void)capability;
    *status = 0; /* NVML_P2P_STATUS_OK */
    return SUCCESS;
}
