/* For all kernels: headers, and how a body is compiled for three kinds of x86 processors and chosen when the module is
loaded. Elsewhere there is one. */

#ifndef DPFORMER_COMMON_H
#define DPFORMER_COMMON_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define ALONE __attribute__((noinline))
#else
#define ALONE __attribute__((noinline, noclone))
#endif
#define FETCH(place) __builtin_prefetch(place)
#else
#define INLINE static inline
#define FETCH(place) ((void)0)
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define TARGETS 1
#define V4 __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,prefer-vector-width=512")))
#define V3 __attribute__((target("avx2,fma,bmi,bmi2")))
#else
#define TARGETS 0
#endif

/* Defines NAME, which calls the body compiled for this processor. */
#if TARGETS
static int level = 0; /* 2: AVX-512, 1: AVX2, 0: neither */
#define COMPILED(NAME, PARAMETERS, ARGUMENTS)                                                                          \
    V4 static void NAME##_v4 PARAMETERS { NAME##_body ARGUMENTS; }                                                     \
    V3 static void NAME##_v3 PARAMETERS { NAME##_body ARGUMENTS; }                                                     \
    static void NAME##_v1 PARAMETERS { NAME##_body ARGUMENTS; }                                                        \
    static void NAME PARAMETERS                                                                                        \
    {                                                                                                                  \
        if (level == 2)                                                                                                \
            NAME##_v4 ARGUMENTS;                                                                                       \
        else if (level == 1)                                                                                           \
            NAME##_v3 ARGUMENTS;                                                                                       \
        else                                                                                                           \
            NAME##_v1 ARGUMENTS;                                                                                       \
    }
#else
#define COMPILED(NAME, PARAMETERS, ARGUMENTS)                                                                          \
    static void NAME PARAMETERS { NAME##_body ARGUMENTS; }
#endif

#endif
