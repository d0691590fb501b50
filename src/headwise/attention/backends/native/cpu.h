/* Which instruction sets of x86 the processor has and the operating system supports.

   Asked with cpuid and xgetbv directly: __builtin_cpu_supports needs symbols of the compiler's runtime library, which
   not every linker finds. */
#ifndef HEADWISE_CPU_H
#define HEADWISE_CPU_H

#include <stdint.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

typedef struct {
    uint32_t leaf1_ecx, leaf7_ebx; /* of cpuid */
    uint64_t xcr0;                 /* register state that the operating system saves; 0 if unknown */
} CpuFeatures;

enum { CPU_FMA = 1 << 12, CPU_OSXSAVE = 1 << 27, CPU_AVX = 1 << 28, CPU_F16C = 1 << 29 }; /* leaf 1, ecx */
enum { CPU_AVX2 = 1 << 5, CPU_AVX512F = 1 << 16, CPU_AVX512DQ = 1 << 17, CPU_AVX512BW = 1 << 30 }; /* leaf 7, ebx */
#define CPU_AVX512VL (1u << 31)
enum { STATE_YMM = 0x6 /* XMM, YMM */, STATE_ZMM = 0xe6 /* XMM, YMM, opmasks, ZMM0 to 15, ZMM16 to 31 */ };

static inline int has_bits(uint64_t x, uint64_t bits) { return (x & bits) == bits; }

/* What hatch_build.py compiles the AVX2 path with: AVX2, FMA and F16C. */
static inline int can_run_avx2(const CpuFeatures *cpu) {
    return has_bits(cpu->leaf1_ecx, CPU_OSXSAVE | CPU_AVX | CPU_FMA | CPU_F16C) && has_bits(cpu->leaf7_ebx, CPU_AVX2) &&
           has_bits(cpu->xcr0, STATE_YMM);
}

/* What it compiles the AVX-512 path with: F, BW, VL and DQ besides. macOS announces the state of ZMM only after its
   first use, and therefore gets the AVX2 path. */
static inline int can_run_avx512(const CpuFeatures *cpu) {
    return can_run_avx2(cpu) && has_bits(cpu->leaf7_ebx, CPU_AVX512F | CPU_AVX512DQ | CPU_AVX512BW | CPU_AVX512VL) &&
           has_bits(cpu->xcr0, STATE_ZMM);
}

#if defined(__x86_64__)
static inline CpuFeatures read_cpu_features(void) {
    CpuFeatures cpu = {0};
    uint32_t eax, ebx, ecx, edx, highest = __get_cpuid_max(0, NULL);
    if (highest >= 1) {
        __cpuid(1, eax, ebx, ecx, edx);
        cpu.leaf1_ecx = ecx;
    }
    if (highest >= 7) {
        __cpuid_count(7, 0, eax, ebx, ecx, edx);
        cpu.leaf7_ebx = ebx;
    }
    if (cpu.leaf1_ecx & CPU_OSXSAVE) { /* else xgetbv is an illegal instruction */
        __asm__ volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
        cpu.xcr0 = (uint64_t)edx << 32 | eax;
    }
    return cpu;
}
#endif

#endif
