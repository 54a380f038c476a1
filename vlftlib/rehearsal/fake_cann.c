/* An inert stand-in for CANN, so that the genuine torch_npu can be imported and used on a machine without an NPU.
 *
 * Device memory is host memory, a copy is a memcpy, streams and events are always done. Nothing here computes: operators that
 * reach the device's own kernels fail by name, and npu_on_host.py gives torch_npu's operators the CPU's arithmetic instead.
 * Signatures follow CANN's acl headers as far as torch_npu uses them. The functions that it links come first, then those
 * that it looks up by name and does without when they are missing.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NOT_READY_FEATURE = 100000, OUT_OF_MEMORY = 207001, EXECUTION_FAILED = 500002 };

/* Functions with nothing to do. C callers clean up their own arguments, so the lists can be left out. */
#define DONE(name) int name(void) { return OK; }
#define REFUSED(name) int name(void) { return NOT_READY_FEATURE; }

/* vlftlib.devices looks for this symbol to tell a rehearsal from an NPU. */
int vlftlib_stand_in = 1;

static int setting(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}

/* ---- The process and its devices ---- */

DONE(aclInit) DONE(aclFinalize) DONE(aclAppLog)

const char *aclGetRecentErrMsg(void) { return "[stand-in for CANN] this has no counterpart without an NPU"; }

const char *aclrtGetSocName(void) {
    const char *chip = getenv("STAND_IN_CHIP");
    return chip ? chip : "Ascend910B2";
}

int aclrtGetDeviceCount(uint32_t *count) { *count = setting("STAND_IN_DEVICES", 1); return OK; }

static __thread int32_t current_device = 0;
int aclrtSetDevice(int32_t device) { current_device = device; return OK; }
int aclrtGetDevice(int32_t *device) { *device = current_device; return OK; }
DONE(aclrtResetDevice)

static int context, default_stream; /* only their addresses are used */
int aclrtGetCurrentContext(void **current) { *current = &context; return OK; }
DONE(aclrtSetCurrentContext)

int aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) { *can = 0; return OK; }
DONE(aclrtDeviceEnablePeerAccess)
int aclrtDeviceGetBareTgid(int32_t *pid) { *pid = 1; return OK; }
int aclGetDeviceCapability(uint32_t device, int kind, int64_t *value) { *value = 24; return OK; } /* cores, as on a 910B2 */

/* ---- Memory: the host's ---- */

int aclrtMalloc(void **memory, size_t size, int policy) {
    *memory = aligned_alloc(512, (size + 511) / 512 * 512);
    return *memory ? OK : OUT_OF_MEMORY;
}
int aclrtMallocHost(void **memory, size_t size) { return aclrtMalloc(memory, size, 0); }
int aclrtFree(void *memory) { free(memory); return OK; }
int aclrtFreeHost(void *memory) { free(memory); return OK; }
int aclrtGetMemInfo(int kind, size_t *available, size_t *total) {
    *available = (size_t)60 << 30;
    *total = (size_t)64 << 30;
    return OK;
}
int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int direction) {
    memcpy(to, from, size);
    return OK;
}
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int direction, void *stream) {
    memcpy(to, from, size);
    return OK;
}
int aclrtMemset(void *memory, size_t room, int value, size_t size) { memset(memory, value, size); return OK; }

/* Virtual memory (expandable_segments) and sharing between processes are not offered. */
REFUSED(aclrtMallocPhysical) REFUSED(aclrtFreePhysical) REFUSED(aclrtMapMem) REFUSED(aclrtUnmapMem)
REFUSED(aclrtReserveMemAddress) REFUSED(aclrtReleaseMemAddress) REFUSED(aclrtMemExportToShareableHandle)
REFUSED(aclrtMemImportFromShareableHandle) REFUSED(aclrtMemSetPidToShareableHandle)

/* ---- Streams and events: everything has happened already ---- */

static int handle(void **made) { *made = malloc(1); return *made ? OK : OUT_OF_MEMORY; }
int aclrtCreateStream(void **stream) { return handle(stream); }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) { return handle(stream); }
int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { return handle(event); }
int aclrtDestroyStream(void *stream) { free(stream); return OK; }
int aclrtDestroyStreamForce(void *stream) { free(stream); return OK; }
int aclrtDestroyEvent(void *event) { free(event); return OK; }
DONE(aclrtRecordEvent) DONE(aclrtResetEvent) DONE(aclrtStreamWaitEvent) DONE(aclrtSynchronizeEvent)
DONE(aclrtSynchronizeStream) DONE(aclrtProcessReport)
/* A time measured here would mean nothing; it is not zero, because callers divide by it. */
int aclrtEventElapsedTime(float *milliseconds, void *start, void *end) { *milliseconds = 1; return OK; }

/* ---- Operators: none ---- */

int aclopCompileAndExecute(const char *operator) {
    fprintf(stderr, "[stand-in for CANN] operator %s has no arithmetic here\n", operator);
    return EXECUTION_FAILED;
}
void *aclopCreateAttr(void) { return malloc(1); }
void aclopDestroyAttr(void *attributes) { free(attributes); }
DONE(aclopSetAttrBool) DONE(aclopSetAttrDataType) DONE(aclopSetAttrFloat) DONE(aclopSetAttrInt) DONE(aclopSetAttrListBool)
DONE(aclopSetAttrListFloat) DONE(aclopSetAttrListInt) DONE(aclopSetAttrListListInt) DONE(aclopSetAttrString)
void *aclCreateDataBuffer(void *data, size_t size) { return malloc(1); }
int aclDestroyDataBuffer(void *buffer) { free(buffer); return OK; }
void *aclCreateTensorDesc(void) { return malloc(1); }
void aclDestroyTensorDesc(void *description) { free(description); }
int aclGetTensorDescType(void *description) { return 0; }
int aclGetTensorDescFormat(void *description) { return 2; } /* ND: plain strided memory */
size_t aclGetTensorDescNumDims(void *description) { return 0; }
int aclGetTensorDescDimV2(void *description, size_t index, int64_t *size) { *size = 0; return OK; }
DONE(aclSetTensorDescName) DONE(aclSetTensorFormat) DONE(aclSetTensorPlaceMent) DONE(aclSetTensorShape)
REFUSED(aclrtBinaryLoadFromData) REFUSED(aclrtBinaryGetFunction) REFUSED(aclrtGetFunctionAddr)
REFUSED(rtDevBinaryRegister) REFUSED(rtFunctionRegister) REFUSED(rtGetC2cCtrlAddr) REFUSED(rtKernelLaunch)

/* ---- Dumps and profiling: nothing to record ---- */

DONE(aclmdlInitDump) DONE(aclmdlSetDump) DONE(aclmdlFinalizeDump) DONE(MsprofRegisterCallback) DONE(MsprofReportApi)
DONE(MsprofReportAdditionalInfo) DONE(MsprofReportCompactInfo)
uint64_t MsprofGetHashId(const char *text, size_t length) { return 1; }
uint64_t MsprofSysCycleTime(void) { return 0; }

/* ---- Looked up by name: torch_npu asks for these at run time, and fails or warns without them ---- */

DONE(aclrtSetDeviceSatMode) /* whether overflows saturate or give infinity: the CPU's arithmetic gives infinity */
DONE(aclrtSetStreamOverflowSwitch) DONE(aclrtResetOverflowStatus) /* the same on chips before the 910B */
int aclrtGetStreamOverflowSwitch(void *stream, uint32_t *on) { *on = 0; return OK; }
int aclrtGetOverflowStatus(void *status, size_t size, void *stream) { memset(status, 0, size); return OK; }
DONE(aclrtSynchronizeDevice) DONE(aclrtSynchronizeDeviceWithTimeout) DONE(aclrtSynchronizeStreamWithTimeout)
DONE(aclrtSetOpWaitTimeout) DONE(aclrtSetOpExecuteTimeOut) DONE(aclrtSetStreamFailureMode) DONE(aclrtPeekAtLastError)

DONE(aclSetCompileopt)
size_t aclGetCompileoptSize(int option) { return sizeof "disable"; }
int aclGetCompileopt(int option, char *value, size_t room) {
    snprintf(value, room, "disable");
    return OK;
}

DONE(aclrtSetSysParamOpt) DONE(aclrtCtxSetSysParamOpt)
int aclrtGetSysParamOpt(int option, int64_t *value) { *value = 0; return OK; }

int aclrtStreamQuery(void *stream, int *status) { *status = 0; return OK; }
int aclrtQueryEventStatus(void *event, int *status) { *status = 1; return OK; }
int aclrtQueryEventWaitStatus(void *event, int *status) { *status = 1; return OK; }
int aclrtCreateEventWithFlag(void **event, uint32_t flag) { return handle(event); }
int aclrtStreamGetId(void *stream, int32_t *id) { *id = 1; return OK; }

int aclrtMallocAlign32(void **memory, size_t size, int policy) { return aclrtMalloc(memory, size, policy); }
int aclrtMallocHostWithCfg(void **memory, uint64_t size, void *options) { return aclrtMalloc(memory, size, 0); }
int aclrtHostRegister(void *memory, uint64_t size, int kind, void **device) { *device = memory; return OK; }
DONE(aclrtHostUnregister)
int aclrtMemsetAsync(void *memory, size_t room, int value, size_t size, void *stream) {
    return aclrtMemset(memory, room, value, size);
}

int aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) { *active = 1; return OK; }
int aclrtGetDeviceInfo(uint32_t device, int kind, int64_t *value) { *value = 24; return OK; }
int aclrtGetDeviceResLimit(int32_t device, int kind, uint32_t *value) { *value = 24; return OK; }
int aclrtDeviceGetUuid(int32_t device, void *uuid) { memset(uuid, device + 1, 16); return OK; }
int aclGetCannAttributeList(const int **list, size_t *count) { *count = 0; return OK; }
int aclsysGetVersionStr(const char *package, char *version) { strcpy(version, "9.1.0"); return OK; } /* what 2.13 expects */
