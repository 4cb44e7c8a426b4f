/* What the virtual GPUs pretend to be, from MBMEM_GPU_* environment variables (written by virtual_gpu.environment). */
#include "virtual_gpu.h"

#include <cuda.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHARED_BYTES_PER_BLOCK 49152 /* without opt-in; the same on every GPU since compute capability 2 */
#define REGISTERS 65536              /* per block and per SM, since compute capability 5 */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static vgpu_config fixed;
static int is_fixed;

/* A non-negative decimal number; -1 and a line on stderr when the variable is missing or something else. */
static int64_t number(const char *variable) {
    const char *text = getenv(variable);
    char *end = NULL;
    errno = 0;
    int64_t value = text && *text ? strtoll(text, &end, 10) : -1;
    if (value >= 0 && errno == 0 && *end == '\0') return value;
    fprintf(stderr, "pytest-mbmem virtual GPU: %s=%s is not a whole number, so there is no GPU\n", variable,
            text ? text : "(unset)");
    return -1;
}

/* NVML's number of the device that an entry of CUDA_VISIBLE_DEVICES names: by number, or by the beginning of a UUID that
 * no other device's UUID has. -1 when it names none. */
static int named_device(const vgpu_config *config, const char *entry, int by_uuid) {
    char *end, uuid[VGPU_UUID_TEXT];
    int found = -1;
    if (!by_uuid) {
        long number = strtol(entry, &end, 10);
        return end == entry || number < 0 || number >= config->installed_count ? -1 : (int)number;
    }
    for (int i = 0; i < config->installed_count; i++) {
        vgpu_uuid_text(i, uuid);
        if (strncmp(uuid, entry, strcspn(entry, ",")) != 0) continue;
        if (found >= 0) return -1;
        found = i;
    }
    return found;
}

/* CUDA's devices: those that CUDA_VISIBLE_DEVICES names, up to the first entry that is no device. The first entry decides
 * whether they are numbers or UUIDs; naming one device twice leaves none. */
static void select_visible(vgpu_config *config) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    for (int i = 0; i < config->installed_count; i++) config->installed[i] = i;
    config->device_count = config->installed_count;
    if (!text) return;
    int by_uuid = strncmp(text, "GPU-", 4) == 0;
    for (config->device_count = 0;; text++) {
        int device = named_device(config, text, by_uuid);
        if (device < 0) return;
        for (int i = 0; i < config->device_count; i++)
            if (config->installed[i] == device) {
                config->device_count = 0;
                return;
            }
        config->installed[config->device_count++] = device;
        text += strcspn(text, ",");
        if (!*text) return;
    }
}

vgpu_config vgpu_peek_configuration(void) {
    if (__atomic_load_n(&is_fixed, __ATOMIC_ACQUIRE)) return fixed;
    vgpu_config config = {0};
    if (!getenv("MBMEM_GPU_COUNT")) return config; /* no GPU was asked for */
    const struct {
        const char *variable;
        int *value;
    } integers[] = {
        {"MBMEM_GPU_COMPUTE_CAPABILITY_MAJOR", &config.major},
        {"MBMEM_GPU_COMPUTE_CAPABILITY_MINOR", &config.minor},
        {"MBMEM_GPU_SM_COUNT", &config.sm_count},
        {"MBMEM_GPU_THREADS_PER_SM", &config.threads_per_sm},
        {"MBMEM_GPU_L2_BYTES", &config.l2_bytes},
        {"MBMEM_GPU_SHARED_BYTES_PER_SM", &config.shared_bytes_per_sm},
        {"MBMEM_GPU_SHARED_BYTES_PER_BLOCK", &config.shared_bytes_per_block_optin},
    };
    for (size_t i = 0; i < sizeof integers / sizeof *integers; i++) {
        int64_t value = number(integers[i].variable);
        if (value < 0) return config;
        *integers[i].value = (int)value;
    }
    int64_t capacity = number("MBMEM_GPU_CAPACITY"), context = number("MBMEM_GPU_CONTEXT_BYTES");
    int64_t count = number("MBMEM_GPU_COUNT");
    if (capacity < 0 || context < 0 || context > capacity || count < 0) return config;
    if (vgpu_read_staged(&config.staged)) return config;
    config.capacity = (uint64_t)capacity;
    config.context_bytes = (uint64_t)context;
    const char *name = getenv("MBMEM_GPU_NAME");
    snprintf(config.name, sizeof config.name, "%s", name ? name : "Virtual GPU");
    config.installed_count = count > VGPU_MAX_DEVICES ? VGPU_MAX_DEVICES : (int)count;
    select_visible(&config);
    return config;
}

static void fix(void) {
    fixed = vgpu_peek_configuration();
    __atomic_store_n(&is_fixed, 1, __ATOMIC_RELEASE);
}

const vgpu_config *vgpu_configuration(void) {
    pthread_once(&once, fix);
    return &fixed;
}

int vgpu_attribute(int attribute, int device, int *value) {
    const vgpu_config *config = vgpu_configuration();
    if (!value) return VGPU_INVALID_VALUE;
    if (device < 0 || device >= config->device_count) return VGPU_INVALID_DEVICE;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = config->major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = config->minor; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = config->sm_count; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = config->threads_per_sm; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = config->l2_bytes; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = SHARED_BYTES_PER_BLOCK; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = config->shared_bytes_per_block_optin; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = config->shared_bytes_per_sm; break;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = REGISTERS; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: *value = config->threads_per_sm >= 2048 ? 32 : 24; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *value = 64; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *value = 2147483647; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *value = 65535; break;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH: *value = 2147483647; break;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: *value = 512; break;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *value = 3; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = config->installed[device] + 1; break;
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: *value = config->major >= 9; break;
    case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_ECC_ENABLED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: *value = 1; break;
    default: *value = 0; /* a feature that a virtual GPU lacks: graphs, IPC, multicast, fabric handles, ... */
    }
    return VGPU_SUCCESS;
}

void vgpu_pci_bus_id(int installed, char *text, size_t size) {
    snprintf(text, size, "00000000:%02X:00.0", installed + 1);
}

void vgpu_uuid(int installed, unsigned char uuid[16]) {
    memcpy(uuid, "\0\0\0\0" "mbmem-gpu", 13);
    uuid[13] = uuid[14] = 0;
    uuid[0] = uuid[15] = (unsigned char)(installed + 1); /* the first, so that few characters tell devices apart */
}

void vgpu_uuid_text(int installed, char text[VGPU_UUID_TEXT]) {
    unsigned char uuid[16];
    vgpu_uuid(installed, uuid);
    text += sprintf(text, "GPU");
    for (int i = 0; i < 16; i++)
        text += sprintf(text, i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", uuid[i]);
}

static const struct {
    int status;
    const char *runtime, *driver, *text;
} errors[] = {
    {0, "cudaSuccess", "CUDA_SUCCESS", "no error"},
    {1, "cudaErrorInvalidValue", "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {13, "cudaErrorInvalidSymbol", "CUDA_ERROR_UNKNOWN", "invalid device symbol"},
    {100, "cudaErrorNoDevice", "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "cudaErrorDeviceUninitialized", "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {400, "cudaErrorInvalidResourceHandle", "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, "cudaErrorIllegalState", "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {500, "cudaErrorSymbolNotFound", "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "cudaErrorNotReady", "CUDA_ERROR_NOT_READY", "device not ready"},
    {704, "cudaErrorPeerAccessAlreadyEnabled", "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
     "peer access is already enabled"},
    {705, "cudaErrorPeerAccessNotEnabled", "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"},
    {712, "cudaErrorHostMemoryAlreadyRegistered", "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {713, "cudaErrorHostMemoryNotRegistered", "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {801, "cudaErrorNotSupported", "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {900, "cudaErrorStreamCaptureUnsupported", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {901, "cudaErrorStreamCaptureInvalidated", "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {902, "cudaErrorStreamCaptureMerge", "CUDA_ERROR_STREAM_CAPTURE_MERGE",
     "operation would result in a merge of separate capture sequences"},
    {903, "cudaErrorStreamCaptureUnmatched", "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
     "capture was not ended in the same stream as it began"},
    {904, "cudaErrorStreamCaptureUnjoined", "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {905, "cudaErrorStreamCaptureIsolation", "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {906, "cudaErrorStreamCaptureImplicit", "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {907, "cudaErrorCapturedEvent", "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
    {908, "cudaErrorStreamCaptureWrongThread", "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
};
#define NAME_OF(field)                                                       \
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)              \
        if (errors[i].status == status) return errors[i].field;              \
    return NULL

const char *vgpu_runtime_error_name(int status) { NAME_OF(runtime); }
const char *vgpu_driver_error_name(int status) { NAME_OF(driver); }
const char *vgpu_error_text(int status) { NAME_OF(text); }
