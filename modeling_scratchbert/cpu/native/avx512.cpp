// The library with AVX-512, VNNI and bfloat16 instructions.
#include "stack.h"
