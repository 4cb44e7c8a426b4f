/* libcupti: there is nothing to trace. torch's profiler finds CUPTI unusable and goes on without device events. */
int cuptiGetResultString(int result, const char **text) {
    *text = result ? "CUPTI_ERROR_NOT_SUPPORTED (virtual GPU)" : "CUPTI_SUCCESS";
    return 0;
}
int cuptiGetVersion(unsigned int *version) {
    *version = CUPTI_VERSION;
    return 0;
}
