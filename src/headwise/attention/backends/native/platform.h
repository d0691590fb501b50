/* What operating systems call differently: exported names, mutexes, threads, memory. POSIX threads, or Windows. */
#ifndef HEADWISE_PLATFORM_H
#define HEADWISE_PLATFORM_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(_WIN32)

#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <malloc.h>
#include <windows.h>

#define EXPORT __declspec(dllexport)

typedef SRWLOCK Mutex;
typedef CONDITION_VARIABLE Condition;
#define MUTEX_INITIALIZER SRWLOCK_INIT
#define CONDITION_INITIALIZER CONDITION_VARIABLE_INIT

static inline void init_mutex(Mutex *mutex) { InitializeSRWLock(mutex); }
static inline void lock_mutex(Mutex *mutex) { AcquireSRWLockExclusive(mutex); }
static inline int try_lock_mutex(Mutex *mutex) { return TryAcquireSRWLockExclusive(mutex) != 0; }
static inline void unlock_mutex(Mutex *mutex) { ReleaseSRWLockExclusive(mutex); }

static inline void init_condition(Condition *condition) { InitializeConditionVariable(condition); }
static inline void wait_for(Condition *condition, Mutex *mutex) {
    SleepConditionVariableSRW(condition, mutex, INFINITE, 0);
}
static inline void signal_one(Condition *condition) { WakeConditionVariable(condition); }
static inline void signal_all(Condition *condition) { WakeAllConditionVariable(condition); }

/* Defines what start_thread takes: a thread that calls body(number). */
#define DEFINE_THREAD(name, body)              \
    static DWORD WINAPI name(void *number) {   \
        body((int)(intptr_t)number);           \
        return 0;                              \
    }
typedef LPTHREAD_START_ROUTINE Thread;

static inline int start_thread(Thread thread, int number) {
    HANDLE handle = CreateThread(NULL, 0, thread, (void *)(intptr_t)number, 0, NULL);
    if (handle) CloseHandle(handle); /* the thread goes on */
    return handle != NULL;
}

/* A pointer per thread, which is released when its thread ends. */
#define DEFINE_RELEASE(name, release) \
    static void WINAPI name(void *x) { \
        if (x) release(x);            \
    }
typedef DWORD ThreadPointer;

static inline void create_thread_pointer(ThreadPointer *pointer, PFLS_CALLBACK_FUNCTION release) {
    *pointer = FlsAlloc(release);
}
static inline void *get_thread_pointer(ThreadPointer pointer) { return FlsGetValue(pointer); }
static inline void set_thread_pointer(ThreadPointer pointer, void *x) { FlsSetValue(pointer, x); }

static inline void *allocate_aligned(size_t alignment, size_t bytes) { return _aligned_malloc(bytes, alignment); }
static inline void free_aligned(void *x) { _aligned_free(x); }

/* There are no forks. */
static inline void call_after_fork(void (*function)(void)) { (void)function; }
static inline int forked_without_exec(void) { return 0; }

#else /* POSIX */

#include <pthread.h>

#define EXPORT __attribute__((visibility("default")))

typedef pthread_mutex_t Mutex;
typedef pthread_cond_t Condition;
#define MUTEX_INITIALIZER PTHREAD_MUTEX_INITIALIZER
#define CONDITION_INITIALIZER PTHREAD_COND_INITIALIZER

static inline void init_mutex(Mutex *mutex) { pthread_mutex_init(mutex, NULL); }
static inline void lock_mutex(Mutex *mutex) { pthread_mutex_lock(mutex); }
static inline int try_lock_mutex(Mutex *mutex) { return !pthread_mutex_trylock(mutex); }
static inline void unlock_mutex(Mutex *mutex) { pthread_mutex_unlock(mutex); }

static inline void init_condition(Condition *condition) { pthread_cond_init(condition, NULL); }
static inline void wait_for(Condition *condition, Mutex *mutex) { pthread_cond_wait(condition, mutex); }
static inline void signal_one(Condition *condition) { pthread_cond_signal(condition); }
static inline void signal_all(Condition *condition) { pthread_cond_broadcast(condition); }

#define DEFINE_THREAD(name, body)      \
    static void *name(void *number) {  \
        body((int)(intptr_t)number);   \
        return NULL;                   \
    }
typedef void *(*Thread)(void *);

static inline int start_thread(Thread thread, int number) {
    pthread_t handle;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    int error = pthread_create(&handle, &attributes, thread, (void *)(intptr_t)number);
    pthread_attr_destroy(&attributes);
    return !error;
}

#define DEFINE_RELEASE(name, release) \
    static void name(void *x) { release(x); }
typedef pthread_key_t ThreadPointer;

static inline void create_thread_pointer(ThreadPointer *pointer, void (*release)(void *)) {
    pthread_key_create(pointer, release);
}
static inline void *get_thread_pointer(ThreadPointer pointer) { return pthread_getspecific(pointer); }
static inline void set_thread_pointer(ThreadPointer pointer, void *x) { pthread_setspecific(pointer, x); }

static inline void *allocate_aligned(size_t alignment, size_t bytes) {
    void *memory = NULL;
    return posix_memalign(&memory, alignment, bytes) ? NULL : memory;
}
static inline void free_aligned(void *x) { free(x); }

static inline void call_after_fork(void (*function)(void)) { pthread_atfork(NULL, NULL, function); }

/* Whether this process was forked and has not called exec since. Linux keeps the answer in the flags of the process
   (PF_FORKNOEXEC); a process that called exec has other flags. Where they cannot be read, as on macOS, or a sandbox
   shows 0, the answer is the safe one. */
static inline int forked_without_exec(void) {
    enum { PF_FORKNOEXEC = 0x40 };
    char text[512];
    unsigned flags = 0;
    FILE *file = fopen("/proc/self/stat", "re");
    if (!file) return 1;
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    const char *rest = strrchr(text, ')'); /* end of the program's name, which may contain anything */
    if (!rest || sscanf(rest + 1, " %*c %*d %*d %*d %*d %*d %u", &flags) != 1) return 1;
    return !flags || flags & PF_FORKNOEXEC;
}

#endif
#endif
