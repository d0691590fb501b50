/* What the driver needs of the operating system: memory that ends at an inaccessible page, and threads. */
#ifndef HEADWISE_SYSTEM_H
#define HEADWISE_SYSTEM_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct {
    void *pages, *start;
    size_t size;
} Buffer; /* ends where an inaccessible page begins; start is NULL if it is empty, as in PyTorch */

typedef int RunThread(int number);

typedef struct {
    RunThread *run;
    int number, result;
} Started;

enum { MAX_AT_ONCE = 16 };

#if defined(_WIN32)

#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>

static Buffer allocate(size_t bytes) {
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    size_t page = info.dwPageSize, size = (bytes + page - 1) / page * page;
    char *pages = VirtualAlloc(NULL, size + page, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
    DWORD before;
    if (!pages || !VirtualProtect(pages + size, page, PAGE_NOACCESS, &before)) abort();
    return (Buffer){pages, bytes ? pages + size - bytes : NULL, size + page};
}

static void release(Buffer b) { VirtualFree(b.pages, 0, MEM_RELEASE); }

static DWORD WINAPI run_started(void *x) {
    Started *thread = x;
    thread->result = thread->run(thread->number);
    return 0;
}

/* The sum of run(1), ..., run(count), which run at once. */
static int run_at_once(RunThread *run, int count) {
    Started threads[MAX_AT_ONCE];
    HANDLE handles[MAX_AT_ONCE];
    int sum = 0;
    for (int i = 0; i < count; i++) {
        threads[i] = (Started){run, i + 1, 0};
        handles[i] = CreateThread(NULL, 0, run_started, threads + i, 0, NULL);
        if (!handles[i]) abort();
    }
    for (int i = 0; i < count; i++) {
        WaitForSingleObject(handles[i], INFINITE);
        CloseHandle(handles[i]);
        sum += threads[i].result;
    }
    return sum;
}

#else

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

static Buffer allocate(size_t bytes) {
    size_t page = sysconf(_SC_PAGESIZE), size = (bytes + page - 1) / page * page;
    char *pages = mmap(NULL, size + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) abort();
    mprotect(pages + size, page, PROT_NONE);
    return (Buffer){pages, bytes ? pages + size - bytes : NULL, size + page};
}

static void release(Buffer b) { munmap(b.pages, b.size); }

static void *run_started(void *x) {
    Started *thread = x;
    thread->result = thread->run(thread->number);
    return NULL;
}

static int run_at_once(RunThread *run, int count) {
    Started threads[MAX_AT_ONCE];
    pthread_t handles[MAX_AT_ONCE];
    int sum = 0;
    for (int i = 0; i < count; i++) {
        threads[i] = (Started){run, i + 1, 0};
        if (pthread_create(handles + i, NULL, run_started, threads + i)) abort();
    }
    for (int i = 0; i < count; i++) {
        pthread_join(handles[i], NULL);
        sum += threads[i].result;
    }
    return sum;
}

#endif
#endif
