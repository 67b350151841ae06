// The library with AVX-512 and AMX: products of bfloat16 and int8 in tiles.
#include <sys/syscall.h>
#include <unistd.h>

// Compilers do not agree on the macro that says it.
#define HAS_AMX
#include "stack.h"

// Linux gives a process the registers of AMX when it asks for them. Whether it does.
EXPORT int scratchbert_has_amx() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
