/* libnvrtc: compiles nothing, and says that it went well: the kernels would not run anyway. */
#include "virtual_gpu.h"

#include <string.h>

static const char image[8] = "virtual"; /* what stands for PTX and machine code */
static const int architectures[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

int nvrtcVersion(int *major, int *minor) {
    *major = CUDA_MAJOR;
    *minor = CUDA_MINOR;
    return 0;
}
int nvrtcGetNumSupportedArchs(int *count) {
    *count = sizeof architectures / sizeof *architectures;
    return 0;
}
int nvrtcGetSupportedArchs(int *list) {
    memcpy(list, architectures, sizeof architectures);
    return 0;
}
int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers, const char *const *texts,
                       const char *const *names) {
    (void)source, (void)name, (void)headers, (void)texts, (void)names;
    *program = (void *)(uintptr_t)vgpu_new_handle();
    return 0;
}
static int image_size(void *program, size_t *bytes) {
    (void)program;
    *bytes = sizeof image;
    return 0;
}
static int image_copy(void *program, char *to) {
    (void)program;
    memcpy(to, image, sizeof image);
    return 0;
}
int nvrtcGetPTXSize(void *program, size_t *bytes) { return image_size(program, bytes); }
int nvrtcGetPTX(void *program, char *to) { return image_copy(program, to); }
int nvrtcGetCUBINSize(void *program, size_t *bytes) { return image_size(program, bytes); }
int nvrtcGetCUBIN(void *program, char *to) { return image_copy(program, to); }
int nvrtcGetProgramLogSize(void *program, size_t *bytes) {
    (void)program;
    *bytes = 1;
    return 0;
}
int nvrtcGetProgramLog(void *program, char *to) {
    (void)program;
    *to = '\0';
    return 0;
}
int nvrtcGetLoweredName(void *program, const char *expression, const char **name) {
    (void)program, (void)expression;
    *name = "kernel";
    return 0;
}
const char *nvrtcGetErrorString(int status) { return status ? "NVRTC_ERROR" : "NVRTC_SUCCESS"; }
