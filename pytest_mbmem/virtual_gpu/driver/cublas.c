/* libcublas: handles that remember what was set on them. Everything that computes is generated and succeeds. */
#include "virtual_gpu.h"

#include <stdlib.h>

/* torch keeps one workspace per handle and stream, so two handles must never be one. */
typedef struct {
    int math_mode, pointer_mode;
    void *stream;
} handle;

int cublasCreate_v2(void **created) {
    if (vgpu_enter() < 0) return 1; /* CUBLAS_STATUS_NOT_INITIALIZED */
    *created = calloc(1, sizeof(handle));
    return *created ? 0 : 3; /* CUBLAS_STATUS_ALLOC_FAILED */
}
int cublasDestroy_v2(void *h) {
    free(h);
    return 0;
}
int cublasSetStream_v2(void *h, void *stream) {
    ((handle *)h)->stream = stream;
    return 0;
}
int cublasGetStream_v2(void *h, void **stream) {
    *stream = ((handle *)h)->stream;
    return 0;
}
int cublasSetMathMode(void *h, int mode) {
    ((handle *)h)->math_mode = mode;
    return 0;
}
int cublasGetMathMode(void *h, int *mode) {
    *mode = ((handle *)h)->math_mode;
    return 0;
}
int cublasSetPointerMode_v2(void *h, int mode) {
    ((handle *)h)->pointer_mode = mode;
    return 0;
}
int cublasGetPointerMode_v2(void *h, int *mode) {
    *mode = ((handle *)h)->pointer_mode;
    return 0;
}
int cublasGetVersion_v2(void *h, int *version) {
    (void)h;
    *version = CUBLAS_VERSION;
    return 0;
}
const char *cublasGetStatusString(int status) { return status ? "virtual GPU: cuBLAS error" : "the operation completed successfully"; }
const char *cublasGetStatusName(int status) { return status ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_SUCCESS"; }
