/* An emulated CUDA driver: what its parts share. See README.md for what it models and what it cannot.
 *
 * Everything that processes share lies in one file, mapped by each: devices, faults to inject, and a row of counters
 * per process. layout.py reads and writes the same structures; keep the two equal. */
#ifndef FAKE_H
#define FAKE_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef uint64_t CUhandle;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, DEVICE_UNAVAILABLE = 46, NO_DEVICE = 100,
    INVALID_DEVICE = 101, INVALID_CONTEXT = 201, ALREADY_MAPPED = 208, OPERATING_SYSTEM = 304, INVALID_HANDLE = 400,
    NOT_FOUND = 500, ILLEGAL_ADDRESS = 700, NOT_SUPPORTED = 801, UNKNOWN = 999
};

#define MAX_DEVICES 8
#define MAX_FAULTS 32
#define MAX_PROCESSES 1024
#define MAX_CALLS 88
#define GRANULARITY ((size_t)2 << 20)
#define MAGIC 0x46435544

enum { HAS_VMM = 1, HAS_FD = 2, IS_MIG = 4, HAS_IPC = 8, HAS_FABRIC = 16 };

/* What a process has at this moment, as the driver counts it. */
enum { LIVE_HANDLES, LIVE_MAPPINGS, LIVE_RESERVATIONS, LIVE_CONTEXTS, LIVE_ALLOCATIONS, LIVE_IMPORTS, LIVE_PINNED,
       LIVE_STREAMS, NUM_LIVE };

struct device_row { /* 256 bytes */
    char name[64];
    uint8_t uuid[16];
    uint64_t total_bytes;
    uint32_t flags, major, minor, unused;
    uint64_t context_bytes; /* what a primary context takes of the device */
    uint8_t unused2[144];
};

struct fault_row { /* 128 bytes */
    char call[48];
    char process[64]; /* a part of the process's command line; empty: any */
    uint32_t nth;     /* of this process's calls of that name, from 1; 0: every one */
    int32_t error;
    uint32_t num_fired;
    uint32_t unused;
};

struct process_row { /* 512 bytes */
    uint32_t pid, unused;
    uint64_t start_time;
    uint32_t live[NUM_LIVE];
    char command[112];
    uint32_t calls[MAX_CALLS];
};

struct shared {
    uint32_t magic, num_devices;
    char id[16]; /* in the names of this machine's memfds */
    uint8_t unused[4096 - 24];
    struct device_row devices[MAX_DEVICES]; /* 2048 */
    uint8_t unused2[2048];
    struct fault_row faults[MAX_FAULTS]; /* 4096 */
    uint8_t unused3[4096];
    struct process_row processes[MAX_PROCESSES];
};

struct memory { /* one allocation of a device, in a memfd */
    int fd, device;
    size_t size;
};

/* state.c */
extern struct shared *state;
extern struct process_row *self;
extern pthread_mutex_t tables;
CUresult fake_start(void);
CUresult fake_enter(int call);
void count_live(int what, int change);
CUresult take_memory(int device, size_t size, struct memory *out);
CUresult open_memory(int fd, struct memory *out);
CUresult find_memory(uint64_t inode, struct memory *out);
size_t used_bytes(int device);
uint64_t start_time_of(int pid);
int physical(CUdevice visible);
int visible_index(int device);
int num_visible(void);

/* device.c */
CUcontext current_context(void);
int context_device(CUcontext context);
int has_context(int device);

/* vmm.c */
int vmm_covers(CUdeviceptr start, size_t size, int writes);

/* copy.c */
void flush_all(void);

#define CALLS(X) \
    X(cuInit) X(cuDriverGetVersion) X(cuDeviceGet) X(cuDeviceGetCount) X(cuDeviceGetName) X(cuDeviceGetUuid) \
    X(cuDeviceTotalMem) X(cuDeviceGetAttribute) X(cuDeviceGetPCIBusId) X(cuDevicePrimaryCtxRetain) \
    X(cuDevicePrimaryCtxRelease) X(cuDevicePrimaryCtxGetState) X(cuCtxSetCurrent) X(cuCtxGetCurrent) \
    X(cuCtxGetDevice) X(cuCtxSynchronize) X(cuMemGetAllocationGranularity) X(cuMemCreate) X(cuMemRelease) \
    X(cuMemExportToShareableHandle) X(cuMemImportFromShareableHandle) X(cuMemAddressReserve) X(cuMemAddressFree) \
    X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess) X(cuMemGetInfo) X(cuMemAlloc) X(cuMemFree) X(cuIpcGetMemHandle) \
    X(cuIpcOpenMemHandle) X(cuIpcCloseMemHandle) X(cuMemHostAlloc) X(cuMemFreeHost) X(cuMemcpyHtoD) X(cuMemcpyDtoH) \
    X(cuMemcpyHtoDAsync) X(cuMemcpyDtoHAsync) X(cuMemcpyDtoD) X(cuMemsetD8) X(cuStreamCreate) X(cuStreamDestroy) \
    X(cuStreamSynchronize) X(cuEventCreate) X(cuEventDestroy) X(cuEventRecord) X(cuEventSynchronize) \
    X(cuMemGetAllocationPropertiesFromHandle)

#define AS_ENUM(name) CALL_##name,
enum { CALLS(AS_ENUM) NUM_CALLS };

/* Counts the call, and answers in its place if a fault is due. */
#define ENTER(name) \
    do { \
        CUresult entered = fake_enter(CALL_##name); \
        if (entered != SUCCESS) return entered; \
    } while (0)

#endif
