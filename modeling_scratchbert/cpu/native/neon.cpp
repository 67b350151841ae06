// The library with NEON. On other processors, it is empty.
#ifdef __aarch64__
#include "stack.h"
#endif
