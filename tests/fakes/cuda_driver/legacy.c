/* cuMemAlloc, and its IPC handles: memory that belongs to a process and dies with it. */
#define _GNU_SOURCE
#include "fake.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

struct allocation { /* our own, or one imported */
    struct allocation *next;
    CUdeviceptr start;
    struct memory memory;
    int is_import, exporter, num_opened;
    int32_t pid, fd; /* of an import: which of the exporter's */
    int stop;        /* of an import: an eventfd that ends its watcher */
    pthread_t watcher;
};

struct ipc_handle { /* 64 bytes */
    uint32_t magic;
    int32_t pid, fd, device;
    uint64_t start_time, size;
    uint8_t unused[32];
};

static struct allocation *allocations;

static struct allocation **find(CUdeviceptr start, int is_import)
{
    struct allocation **place = &allocations;
    while (*place && ((*place)->start != start || (*place)->is_import != is_import)) place = &(*place)->next;
    return place;
}

int legacy_covers(CUdeviceptr start, size_t size)
{
    pthread_mutex_lock(&tables);
    struct allocation *found = allocations;
    while (found && !(found->start <= start && start + size <= found->start + found->memory.size)) found = found->next;
    pthread_mutex_unlock(&tables);
    return found != NULL;
}

static struct allocation *map_memory(struct memory memory, int is_import)
{
    void *address = mmap(NULL, memory.size, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd, 0);
    if (address == MAP_FAILED) return NULL;
    struct allocation *made = malloc(sizeof *made);
    pthread_mutex_lock(&tables);
    *made = (struct allocation){.next = allocations, .start = (CUdeviceptr)address, .memory = memory,
                                .is_import = is_import, .num_opened = 1, .exporter = -1, .stop = -1};
    allocations = made;
    pthread_mutex_unlock(&tables);
    return made;
}

CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t size)
{
    ENTER(cuMemAlloc);
    if (!current_context()) return INVALID_CONTEXT;
    if (!size) return INVALID_VALUE;
    struct memory memory;
    CUresult result = take_memory(context_device(current_context()), (size + 511) / 512 * 512, &memory);
    if (result != SUCCESS) return result;
    struct allocation *made = map_memory(memory, 0);
    if (!made) {
        close(memory.fd);
        return OUT_OF_MEMORY;
    }
    count_live(LIVE_ALLOCATIONS, 1);
    *out = made->start;
    return SUCCESS;
}

static void end_watch(struct allocation *import)
{
    uint64_t one = 1;
    if (write(import->stop, &one, sizeof one) == sizeof one) pthread_join(import->watcher, NULL);
    close(import->stop);
    close(import->exporter);
}

static CUresult drop(CUdeviceptr start, int is_import)
{
    pthread_mutex_lock(&tables);
    struct allocation **place = find(start, is_import), *found = *place;
    int is_last = found && --found->num_opened == 0;
    if (is_last) *place = found->next;
    pthread_mutex_unlock(&tables);
    if (!found) return INVALID_VALUE;
    if (!is_last) return SUCCESS;
    if (is_import) end_watch(found);
    /* Importers lose what is freed under them. */
    if (!is_import && ftruncate(found->memory.fd, 0)) return OPERATING_SYSTEM;
    munmap((void *)found->start, found->memory.size);
    close(found->memory.fd);
    free(found);
    count_live(is_import ? LIVE_IMPORTS : LIVE_ALLOCATIONS, -1);
    return SUCCESS;
}

CUresult cuMemFree_v2(CUdeviceptr start)
{
    ENTER(cuMemFree);
    return current_context() ? drop(start, 0) : INVALID_CONTEXT;
}

CUresult cuIpcGetMemHandle(struct ipc_handle *out, CUdeviceptr start)
{
    ENTER(cuIpcGetMemHandle);
    pthread_mutex_lock(&tables);
    struct allocation *found = *find(start, 0);
    if (found)
        *out = (struct ipc_handle){MAGIC, getpid(), found->memory.fd, found->memory.device, start_time_of(getpid()),
                                   found->memory.size, {0}};
    pthread_mutex_unlock(&tables);
    if (!found) return INVALID_VALUE;
    return state->devices[found->memory.device].flags & HAS_IPC ? SUCCESS : NOT_SUPPORTED;
}

/* Memory dies with its exporter, also for those who mapped it: their next access faults. */
static void *watch(void *argument)
{
    struct allocation *import = argument;
    struct pollfd ends[] = {{import->exporter, POLLIN, 0}, {import->stop, POLLIN, 0}};
    while (poll(ends, 2, -1) < 0) continue;
    if (ends[1].revents) return NULL;
    mprotect((void *)import->start, import->memory.size, PROT_NONE);
    return NULL;
}

/* A handle that is open already is counted, and has the address it had. */
static struct allocation *find_opened(const struct ipc_handle *handle)
{
    struct allocation *found = allocations;
    while (found && !(found->is_import && found->pid == handle->pid && found->fd == handle->fd &&
                      start_time_of(handle->pid) == handle->start_time))
        found = found->next;
    return found;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, struct ipc_handle handle, unsigned flags)
{
    ENTER(cuIpcOpenMemHandle);
    if (!current_context() || handle.pid == getpid()) return INVALID_CONTEXT;
    if (flags != 1 || handle.magic != MAGIC) return INVALID_VALUE;
    if (context_device(current_context()) != handle.device) return INVALID_DEVICE;
    if (!(state->devices[handle.device].flags & HAS_IPC)) return NOT_SUPPORTED;
    pthread_mutex_lock(&tables);
    struct allocation *opened = find_opened(&handle);
    if (opened) opened->num_opened++;
    if (opened) *out = opened->start;
    pthread_mutex_unlock(&tables);
    if (opened) return SUCCESS;
    int exporter = (int)syscall(SYS_pidfd_open, handle.pid, 0);
    if (exporter < 0) return INVALID_HANDLE;
    if (start_time_of(handle.pid) != handle.start_time) {
        close(exporter);
        return INVALID_HANDLE;
    }
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
    struct memory memory = {open(path, O_RDWR | O_CLOEXEC), handle.device, handle.size};
    struct allocation *made = memory.fd < 0 ? NULL : map_memory(memory, 1);
    if (!made) {
        close(exporter);
        if (memory.fd >= 0) close(memory.fd);
        return INVALID_HANDLE;
    }
    made->exporter = exporter;
    made->pid = handle.pid;
    made->fd = handle.fd;
    made->stop = eventfd(0, EFD_CLOEXEC);
    pthread_create(&made->watcher, NULL, watch, made);
    count_live(LIVE_IMPORTS, 1);
    *out = made->start;
    return SUCCESS;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr start)
{
    ENTER(cuIpcCloseMemHandle);
    return current_context() ? drop(start, 1) : INVALID_CONTEXT;
}
