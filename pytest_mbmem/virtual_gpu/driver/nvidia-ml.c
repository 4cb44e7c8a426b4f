/* libnvidia-ml: NVML as torch and pynvml ask it. NVML is asked before a fork server forks, so it never fixes the
 * configuration. No pip package has nvml.h: the few structures are declared here as NVIDIA documents them. */
#include "virtual_gpu.h"

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
    *version = vgpu_cuda_version();
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
    char uuid[VGPU_UUID_TEXT];
    vgpu_uuid_text(index_of(handle), uuid);
    return give_text(uuid, text, size);
}
int nvmlDeviceGetHandleByUUID(const char *wanted, void **handle) {
    char uuid[VGPU_UUID_TEXT];
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
static uint64_t own_bytes(void *handle) {
    vgpu_config config = vgpu_peek_configuration();
    vgpu_counters counters;
    for (int device = 0; device < config.device_count; device++)
        if (config.installed[device] == index_of(handle) && vgpu_has_context(device) &&
            vgpu_read_counters(device, &counters) == 0)
            return counters.bytes_used + config.context_bytes;
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, memory_info *info) {
    vgpu_config config = vgpu_peek_configuration();
    info->total = config.capacity;
    info->used = own_bytes(handle) + vgpu_foreign_bytes(&config.staged, index_of(handle));
    if (info->used > info->total) info->used = info->total;
    info->free = info->total - info->used;
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_info_v2 *info) {
    memory_info first;
    nvmlDeviceGetMemoryInfo(handle, &first);
    info->total = first.total;
    info->used = first.used;
    info->free = first.free;
    info->reserved = 0;
    return SUCCESS;
}

/* The processes on a virtual GPU are the caller, and those that a test stages. */
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned int *count, process_v2 *processes) {
    vgpu_config config = vgpu_peek_configuration();
    process_v2 all[1 + VGPU_MAX_FOREIGN];
    const vgpu_foreign *foreign;
    unsigned int room = *count, found = 0;
    if (own_bytes(handle)) all[found++] = (process_v2){(unsigned int)getpid(), own_bytes(handle), ~0u, ~0u};
    for (int i = 0; (foreign = vgpu_foreign_process(&config.staged, index_of(handle), i)); i++)
        all[found++] = (process_v2){foreign->pid, foreign->bytes, ~0u, ~0u};
    *count = found;
    if (found > room) return INSUFFICIENT_SIZE;
    if (found) memcpy(processes, all, found * sizeof *all);
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned int *count, process_v1 *processes) {
    process_v2 all[1 + VGPU_MAX_FOREIGN];
    int status = nvmlDeviceGetComputeRunningProcesses_v3(handle, count, all);
    for (unsigned int i = 0; status == SUCCESS && i < *count; i++)
        processes[i] = (process_v1){all[i].pid, all[i].used};
    return status;
}
int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned int *count, process_v2 *processes) {
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, processes);
}

/* No MIG, no NVLink topology, no fabric: whoever asks finds the plain case. */
int nvmlDeviceGetMigMode(void *handle, unsigned int *current, unsigned int *pending) {
    (void)handle, (void)current, (void)pending;
    return NOT_SUPPORTED;
}
int nvmlDeviceIsMigDeviceHandle(void *handle, unsigned int *is_mig) {
    (void)handle;
    *is_mig = 0;
    return SUCCESS;
}
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
