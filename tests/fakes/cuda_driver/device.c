/* Devices and their primary contexts. */
#define _GNU_SOURCE
#include "fake.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct context {
    int device, num_retained;
    struct memory memory; /* its own, if contexts take any */
};

static struct context primary[MAX_DEVICES];
static __thread CUcontext current;

CUcontext current_context(void) { return current && current->num_retained ? current : NULL; }
int context_device(CUcontext context) { return context->device; }
int has_context(int device) { return primary[device].num_retained > 0; }

CUresult cuInit(unsigned flags)
{
    ENTER(cuInit);
    return flags ? INVALID_VALUE : fake_start();
}

CUresult cuDriverGetVersion(int *version)
{
    ENTER(cuDriverGetVersion);
    *version = 13000;
    return SUCCESS;
}

CUresult cuDeviceGetCount(int *count)
{
    ENTER(cuDeviceGetCount);
    *count = num_visible();
    return SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    ENTER(cuDeviceGet);
    if (physical(ordinal) < 0) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    ENTER(cuDeviceGetName);
    if (physical(device) < 0) return INVALID_DEVICE;
    snprintf(name, (size_t)length, "%s", state->devices[physical(device)].name);
    return SUCCESS;
}

CUresult cuDeviceGetUuid_v2(uint8_t uuid[16], CUdevice device)
{
    ENTER(cuDeviceGetUuid);
    if (physical(device) < 0) return INVALID_DEVICE;
    memcpy(uuid, state->devices[physical(device)].uuid, 16);
    return SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    ENTER(cuDeviceTotalMem);
    if (physical(device) < 0) return INVALID_DEVICE;
    *bytes = state->devices[physical(device)].total_bytes;
    return SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device)
{
    ENTER(cuDeviceGetPCIBusId);
    if (physical(device) < 0) return INVALID_DEVICE;
    snprintf(text, (size_t)length, "0000:%02X:00.0", physical(device) + 1);
    return SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    ENTER(cuDeviceGetAttribute);
    if (physical(device) < 0) return INVALID_DEVICE;
    const struct device_row *row = &state->devices[physical(device)];
    switch (attribute) {
    case 41: *value = 1; break; /* unified addressing */
    case 75: *value = (int)row->major; break;
    case 76: *value = (int)row->minor; break;
    case 102: *value = !!(row->flags & HAS_VMM); break;
    case 103: *value = !!(row->flags & HAS_FD); break;
    case 125: *value = !!(row->flags & HAS_IPC); break;
    case 128: *value = !!(row->flags & HAS_FABRIC); break;
    default: *value = 0;
    }
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    ENTER(cuDevicePrimaryCtxRetain);
    int which = physical(device);
    if (which < 0) return INVALID_DEVICE;
    CUresult result = SUCCESS;
    size_t size = state->devices[which].context_bytes;
    struct context *wanted = &primary[which];
    pthread_mutex_lock(&tables);
    wanted->device = which;
    if (wanted->num_retained == 0 && size) result = take_memory(which, size, &wanted->memory);
    if (result == SUCCESS && wanted->num_retained++ == 0) count_live(LIVE_CONTEXTS, 1);
    pthread_mutex_unlock(&tables);
    *context = wanted;
    return result;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    ENTER(cuDevicePrimaryCtxRelease);
    int which = physical(device);
    if (which < 0) return INVALID_DEVICE;
    CUresult result = SUCCESS;
    pthread_mutex_lock(&tables);
    if (primary[which].num_retained == 0) result = INVALID_CONTEXT;
    else if (--primary[which].num_retained == 0) {
        count_live(LIVE_CONTEXTS, -1);
        if (primary[which].memory.size) close(primary[which].memory.fd);
        primary[which].memory.size = 0;
    }
    pthread_mutex_unlock(&tables);
    return result;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    ENTER(cuDevicePrimaryCtxGetState);
    if (physical(device) < 0) return INVALID_DEVICE;
    *flags = 0;
    *active = has_context(physical(device));
    return SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    ENTER(cuCtxSetCurrent);
    if (context && !context->num_retained) return INVALID_CONTEXT;
    current = context;
    return SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context)
{
    ENTER(cuCtxGetCurrent);
    *context = current_context();
    return SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device)
{
    ENTER(cuCtxGetDevice);
    if (!current_context()) return INVALID_CONTEXT;
    *device = visible_index(current->device);
    return SUCCESS;
}

CUresult cuCtxSynchronize(void)
{
    ENTER(cuCtxSynchronize);
    if (!current_context()) return INVALID_CONTEXT;
    flush_all();
    return SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    ENTER(cuMemGetInfo);
    if (!current_context()) return INVALID_CONTEXT;
    size_t total = state->devices[current->device].total_bytes, used = used_bytes(current->device);
    *total_bytes = total;
    *free_bytes = used < total ? total - used : 0;
    return SUCCESS;
}
