/* The whole library, as one translation unit: one run of the compiler, and everything may be inlined. */
#define _GNU_SOURCE
#include <signal.h>
#include "native.h"
#include "pool.c"
#include "rows.c"
#include "attention.c"
#include "matmul.c"
