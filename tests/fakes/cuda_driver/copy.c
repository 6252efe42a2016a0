/* Copies, streams, events, and pinned host memory.
 *
 * A copy from or to pinned memory on a stream is done when somebody waits for it, not before: a caller that reuses its
 * buffer too early, or forgets to wait, gets wrong bytes here as it would on a GPU. Pageable memory is copied at once,
 * which the real driver does as well. */
#define _GNU_SOURCE
#include "fake.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

int legacy_covers(CUdeviceptr start, size_t size);

struct copy {
    struct copy *next;
    void *to;
    const void *from;
    size_t size;
    uint64_t number;
};

struct stream {
    struct stream *next;
    struct copy *first, **end;
    uint64_t num_queued;
};

struct event {
    struct stream *stream;
    uint64_t number;
};

struct pinned {
    struct pinned *next;
    char *start;
    size_t size;
};

static struct stream default_stream = {NULL, NULL, &default_stream.first, 0};
static struct stream *streams;
static struct pinned *pinned;
static pthread_mutex_t queues = PTHREAD_MUTEX_INITIALIZER;

static struct stream *find_stream(CUstream stream)
{
    if (!stream) return &default_stream;
    struct stream *found = streams;
    while (found && found != stream) found = found->next;
    return found;
}

static int is_pinned(const void *address, size_t size)
{
    for (struct pinned *entry = pinned; entry; entry = entry->next)
        if ((const char *)address >= entry->start && (const char *)address + size <= entry->start + entry->size)
            return 1;
    return 0;
}

static void flush_locked(struct stream *stream, uint64_t number)
{
    while (stream->first && stream->first->number <= number) {
        struct copy *copy = stream->first;
        memcpy(copy->to, copy->from, copy->size);
        stream->first = copy->next;
        if (!stream->first) stream->end = &stream->first;
        free(copy);
    }
}

void flush_all(void)
{
    pthread_mutex_lock(&queues);
    flush_locked(&default_stream, UINT64_MAX);
    for (struct stream *stream = streams; stream; stream = stream->next) flush_locked(stream, UINT64_MAX);
    pthread_mutex_unlock(&queues);
}

static int readable(CUdeviceptr start, size_t size) { return vmm_covers(start, size, 0) || legacy_covers(start, size); }
static int writable(CUdeviceptr start, size_t size) { return vmm_covers(start, size, 1) || legacy_covers(start, size); }

static CUresult queue(CUstream handle, void *to, const void *from, size_t size, const void *host)
{
    pthread_mutex_lock(&queues);
    struct stream *stream = find_stream(handle);
    if (stream && is_pinned(host, size)) {
        struct copy *copy = malloc(sizeof *copy);
        *copy = (struct copy){NULL, to, from, size, ++stream->num_queued};
        *stream->end = copy;
        stream->end = &copy->next;
    } else if (stream) {
        flush_locked(stream, UINT64_MAX);
        memcpy(to, from, size);
    }
    pthread_mutex_unlock(&queues);
    return stream ? SUCCESS : INVALID_HANDLE;
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size)
{
    ENTER(cuMemcpyHtoD);
    if (!current_context()) return INVALID_CONTEXT;
    if (!writable(to, size)) return INVALID_VALUE;
    memcpy((void *)to, from, size);
    return SUCCESS;
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size)
{
    ENTER(cuMemcpyDtoH);
    if (!current_context()) return INVALID_CONTEXT;
    if (!readable(from, size)) return INVALID_VALUE;
    memcpy(to, (const void *)from, size);
    return SUCCESS;
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    ENTER(cuMemcpyDtoD);
    if (!current_context()) return INVALID_CONTEXT;
    if (!writable(to, size) || !readable(from, size)) return INVALID_VALUE;
    memmove((void *)to, (const void *)from, size);
    return SUCCESS;
}

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t size)
{
    ENTER(cuMemsetD8);
    if (!current_context()) return INVALID_CONTEXT;
    if (!writable(to, size)) return INVALID_VALUE;
    memset((void *)to, value, size);
    return SUCCESS;
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream)
{
    ENTER(cuMemcpyHtoDAsync);
    if (!current_context()) return INVALID_CONTEXT;
    if (!writable(to, size)) return INVALID_VALUE;
    return queue(stream, (void *)to, from, size, from);
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream)
{
    ENTER(cuMemcpyDtoHAsync);
    if (!current_context()) return INVALID_CONTEXT;
    if (!readable(from, size)) return INVALID_VALUE;
    return queue(stream, to, (const void *)from, size, to);
}

CUresult cuMemHostAlloc(void **out, size_t size, unsigned flags)
{
    (void)flags;
    ENTER(cuMemHostAlloc);
    if (!current_context()) return INVALID_CONTEXT;
    void *address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) return OUT_OF_MEMORY;
    struct pinned *entry = malloc(sizeof *entry);
    pthread_mutex_lock(&queues);
    *entry = (struct pinned){pinned, address, size};
    pinned = entry;
    pthread_mutex_unlock(&queues);
    count_live(LIVE_PINNED, 1);
    *out = address;
    return SUCCESS;
}

CUresult cuMemFreeHost(void *address)
{
    ENTER(cuMemFreeHost);
    flush_all();
    pthread_mutex_lock(&queues);
    struct pinned **place = &pinned;
    while (*place && (*place)->start != address) place = &(*place)->next;
    struct pinned *found = *place;
    if (found) *place = found->next;
    pthread_mutex_unlock(&queues);
    if (!found) return INVALID_VALUE;
    munmap(found->start, found->size);
    free(found);
    count_live(LIVE_PINNED, -1);
    return SUCCESS;
}

CUresult cuStreamCreate(CUstream *out, unsigned flags)
{
    ENTER(cuStreamCreate);
    if (flags > 1) return INVALID_VALUE;
    if (!current_context()) return INVALID_CONTEXT;
    struct stream *stream = malloc(sizeof *stream);
    pthread_mutex_lock(&queues);
    *stream = (struct stream){streams, NULL, &stream->first, 0};
    streams = stream;
    pthread_mutex_unlock(&queues);
    count_live(LIVE_STREAMS, 1);
    *out = stream;
    return SUCCESS;
}

CUresult cuStreamDestroy_v2(CUstream stream)
{
    ENTER(cuStreamDestroy);
    pthread_mutex_lock(&queues);
    struct stream **place = &streams;
    while (*place && *place != stream) place = &(*place)->next;
    struct stream *found = *place;
    if (found) {
        flush_locked(found, UINT64_MAX);
        *place = found->next;
    }
    pthread_mutex_unlock(&queues);
    if (!found) return INVALID_HANDLE;
    free(found);
    count_live(LIVE_STREAMS, -1);
    return SUCCESS;
}

CUresult cuStreamSynchronize(CUstream handle)
{
    ENTER(cuStreamSynchronize);
    pthread_mutex_lock(&queues);
    struct stream *stream = find_stream(handle);
    if (stream) flush_locked(stream, UINT64_MAX);
    pthread_mutex_unlock(&queues);
    return stream ? SUCCESS : INVALID_HANDLE;
}

CUresult cuEventCreate(CUevent *out, unsigned flags)
{
    (void)flags;
    ENTER(cuEventCreate);
    if (!current_context()) return INVALID_CONTEXT;
    *out = calloc(1, sizeof **out);
    count_live(LIVE_STREAMS, 1);
    return SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event)
{
    ENTER(cuEventDestroy);
    if (!event) return INVALID_HANDLE;
    free(event);
    count_live(LIVE_STREAMS, -1);
    return SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream handle)
{
    ENTER(cuEventRecord);
    pthread_mutex_lock(&queues);
    struct stream *stream = find_stream(handle);
    if (stream) *event = (struct event){stream, stream->num_queued};
    pthread_mutex_unlock(&queues);
    return stream ? SUCCESS : INVALID_HANDLE;
}

CUresult cuEventSynchronize(CUevent event)
{
    ENTER(cuEventSynchronize);
    pthread_mutex_lock(&queues);
    if (event->stream) flush_locked(event->stream, event->number);
    pthread_mutex_unlock(&queues);
    return SUCCESS;
}
