/* libcusparse: refused as a whole (generated functions answer CUSPARSE_STATUS_NOT_SUPPORTED); only the text is real. */
const char *cusparseGetErrorString(int status) { return status ? "operation not supported" : "success"; }
