/* libcudnn: enough for convolution, batch norm and fused attention, whose plans need a workspace of 0 bytes here
 * (cuDNN's own choice is not public). What is not written here is generated and answers NOT_SUPPORTED. */
#include "virtual_gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NOT_SUPPORTED 3000 /* CUDNN_STATUS_NOT_SUPPORTED */

typedef struct {
    void *stream;
} handle;

int cudnnCreate(void **created) {
    if (vgpu_enter() < 0) return 1001; /* CUDNN_STATUS_NOT_INITIALIZED */
    *created = calloc(1, sizeof(handle));
    return 0;
}
int cudnnDestroy(void *h) {
    free(h);
    return 0;
}
int cudnnSetStream(void *h, void *stream) {
    ((handle *)h)->stream = stream;
    return 0;
}
int cudnnGetStream(void *h, void **stream) {
    *stream = ((handle *)h)->stream;
    return 0;
}
size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return CUDA_MAJOR * 1000; }
int cudnnGetProperty(int property, int *value) {
    const int parts[] = {CUDNN_VERSION / 10000, CUDNN_VERSION / 100 % 100, CUDNN_VERSION % 100}; /* MAJOR, MINOR, PATCH */
    if (property < 0 || property > 2) return NOT_SUPPORTED;
    *value = parts[property];
    return 0;
}
const char *cudnnGetErrorString(int status) {
    if (status == 0) return "CUDNN_STATUS_SUCCESS";
    return status == NOT_SUPPORTED ? "CUDNN_STATUS_NOT_SUPPORTED (on the virtual GPU)" : "CUDNN_STATUS_NOT_INITIALIZED";
}
void cudnnGetLastErrorString(char *text, size_t size) { snprintf(text, size, "not possible on the virtual GPU"); }

static int give_handle(void **to) {
    *to = (void *)(uintptr_t)vgpu_new_handle();
    return 0;
}
static int accept(void) { return 0; }
#define ACCEPTED(name) int name() __attribute__((alias("accept")))

/* --- the graph API: convolution and attention through cudnn-frontend ---------------------------------------------- */

enum { /* cudnnBackendAttributeName_t and cudnnBackendAttributeType_t, as cudnn_graph.h numbers them */
    ENGINE_SM_COUNT = 1306,
    ENGINE_KNOBS = 1302,
    ENGINE_NUMERICAL_NOTES = 1303,
    ENGINE_LAYOUTS = 1304,
    ENGINE_BEHAVIOUR_NOTES = 1305,
    ENGINE_CONFIG_KNOBS = 302,
    PLAN_WORKSPACE_BYTES = 402,
    PLAN_INTERMEDIATE_IDS = 403,
    PLAN_RUN_ONLY_INTERMEDIATE_IDS = 404,
    PLAN_JSON = 405,
    GRAPH_ENGINE_COUNT = 203,
    ENGINE_HEURISTIC_RESULTS = 2702,
    TYPE_BOOLEAN = 2,
    TYPE_INT64 = 3,
    TYPE_DESCRIPTOR = 15,
    TYPE_INT32 = 23,
};

int cudnnBackendCreateDescriptor(int type, void **to) {
    (void)type;
    return give_handle(to);
}
ACCEPTED(cudnnBackendDestroyDescriptor);
ACCEPTED(cudnnBackendSetAttribute);
ACCEPTED(cudnnBackendFinalize);
ACCEPTED(cudnnBackendExecute);
ACCEPTED(cudnnBackendPopulateCudaGraph);
ACCEPTED(cudnnBackendUpdateCudaGraph);

/* One engine, without knobs or notes; lists are empty, numbers are 0. */
int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t room, int64_t *count, void *values) {
    int64_t found = 1, value = 0;
    (void)descriptor;
    switch (name) {
    case ENGINE_KNOBS:
    case ENGINE_NUMERICAL_NOTES:
    case ENGINE_LAYOUTS:
    case ENGINE_BEHAVIOUR_NOTES:
    case ENGINE_CONFIG_KNOBS:
    case PLAN_INTERMEDIATE_IDS:
    case PLAN_RUN_ONLY_INTERMEDIATE_IDS:
    case PLAN_JSON: found = 0; break;
    case ENGINE_SM_COUNT: value = vgpu_configuration()->sm_count; break;
    case GRAPH_ENGINE_COUNT: value = 1; break;
    }
    if (found && values && room > 0) {
        if (type == TYPE_INT64) *(int64_t *)values = value;
        else if (type == TYPE_BOOLEAN) *(char *)values = 0;
        else if (type != TYPE_DESCRIPTOR) *(int32_t *)values = (int32_t)value;
    }
    if (count) *count = found;
    return 0;
}

/* --- batch norm ----------------------------------------------------------------------------------------------------- */

int cudnnCreateTensorDescriptor(void **to) { return give_handle(to); }
int cudnnCreateActivationDescriptor(void **to) { return give_handle(to); }
ACCEPTED(cudnnDestroyTensorDescriptor);
ACCEPTED(cudnnDestroyActivationDescriptor);
ACCEPTED(cudnnSetTensorNdDescriptor);
ACCEPTED(cudnnSetTensor4dDescriptor);
ACCEPTED(cudnnSetActivationDescriptor);
ACCEPTED(cudnnBatchNormalizationForwardInference);
ACCEPTED(cudnnBatchNormalizationForwardTrainingEx);
ACCEPTED(cudnnBatchNormalizationBackwardEx);

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int mode, int operations, void *x, void *z,
                                                             void *y, void *scale, void *activation, size_t *bytes) {
    (void)h, (void)mode, (void)operations, (void)x, (void)z, (void)y, (void)scale, (void)activation;
    *bytes = 0;
    return 0;
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int mode, int operations, void *x, void *y, void *dy,
                                                      void *dz, void *dx, void *scale, void *activation,
                                                      size_t *bytes) {
    (void)h, (void)mode, (void)operations, (void)x, (void)y, (void)dy, (void)dz, (void)dx, (void)scale;
    (void)activation;
    *bytes = 0;
    return 0;
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int mode, int operations, void *activation, void *x,
                                                         size_t *bytes) {
    (void)h, (void)mode, (void)operations, (void)activation, (void)x;
    *bytes = 0;
    return 0;
}
