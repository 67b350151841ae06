// The library with AVX2 and FMA, for processors without the instructions that avx512.cpp needs.
#include "stack.h"
