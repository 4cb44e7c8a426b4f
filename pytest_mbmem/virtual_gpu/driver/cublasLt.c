/* libcublasLt: descriptors as plain handles, and a heuristic that always finds one algorithm without a workspace of
 * its own (torch allocates a workspace of a fixed size before it asks). */
#include "virtual_gpu.h"

#include <string.h>

typedef struct { /* cublasLtMatmulHeuristicResult_t */
    uint64_t algorithm[8];
    size_t workspace_bytes;
    int status;
    float waves;
    int reserved[4];
} heuristic;

static int give_handle(void **to) {
    *to = (void *)(uintptr_t)vgpu_new_handle();
    return 0;
}
int cublasLtCreate(void **to) { return give_handle(to); }
int cublasLtMatmulDescCreate(void **to, int compute_type, int scale_type) {
    (void)compute_type, (void)scale_type;
    return give_handle(to);
}
int cublasLtMatrixLayoutCreate(void **to, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    (void)type, (void)rows, (void)columns, (void)leading;
    return give_handle(to);
}
int cublasLtMatmulPreferenceCreate(void **to) { return give_handle(to); }
int cublasLtMatrixTransformDescCreate(void **to, int type) {
    (void)type;
    return give_handle(to);
}

int cublasLtMatmulAlgoGetHeuristic(void *h, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, heuristic *results, int *found) {
    (void)h, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference;
    *found = wanted > 0;
    if (wanted > 0) memset(results, 0, sizeof *results);
    return 0;
}
int cublasLtMatmulAlgoInit(void *h, int compute, int scale, int a, int b, int c, int d, int id, void *algorithm) {
    (void)h, (void)compute, (void)scale, (void)a, (void)b, (void)c, (void)d, (void)id;
    memset(algorithm, 0, sizeof(uint64_t[8]));
    return 0;
}
int cublasLtMatmulAlgoCheck(void *h, void *operation, void *a, void *b, void *c, void *d, const void *algorithm,
                            heuristic *result) {
    (void)h, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)algorithm;
    memset(result, 0, sizeof *result);
    return 0;
}
int cublasLtMatmulAlgoConfigGetAttribute(const void *algorithm, int attribute, void *value, size_t size,
                                         size_t *written) {
    (void)algorithm, (void)attribute;
    memset(value, 0, size);
    if (written) *written = size;
    return 0;
}
size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
size_t cublasLtGetCudartVersion(void) { return CUBLAS_VERSION / 10000 * 1000; }
