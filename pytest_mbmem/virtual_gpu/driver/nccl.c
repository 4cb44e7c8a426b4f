/* libnccl: version and error texts. Communicators are refused (generated functions answer ncclInvalidUsage): a job's
 * collectives are answered by torch's fake process group, and NCCL's own memory is not modelled. */
#include "virtual_gpu.h"

int ncclGetVersion(int *version) {
    *version = NCCL_VERSION;
    return 0;
}
const char *ncclGetErrorString(int status) { return status ? "invalid usage (virtual GPU)" : "no error"; }
const char *ncclGetLastError(void *communicator) {
    (void)communicator;
    return "NCCL does not run on a virtual GPU: use torch's fake process group";
}
/* Empty groups: torch opens one while it takes down what it could not set up. */
int ncclGroupStart(void) { return 0; }
int ncclGroupEnd(void) { return 0; }
