"""The few machine operations that numba does not offer, as intrinsics.

Kernels of featstore work on raw addresses: a lane (see :mod:`featstore.engine.lane`) describes reads of any
table, dtype and row size, so one compiled kernel serves them all. The operations here are loads and stores
through an address, ``memcpy``, prefetch, arrays that nobody owns, population count, atomic addition, the
CRC-32C step, and calls through a function address. Calls go through addresses and never through linked
symbols, because a cached kernel whose library is not loaded yet would die with SIGSEGV, while a missing
address is found when the table of addresses is made.
"""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.core import cgutils, config
from numba.core.codegen import get_host_cpu_features
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

# A child forked while another thread compiles would find numba's lock taken for ever: fork waits for the
# compiler instead.
os.register_at_fork(
    before=global_compiler_lock.acquire,
    after_in_parent=global_compiler_lock.release,
    after_in_child=global_compiler_lock.release,
)

#: Options of ``njit`` for what only kernels call: wrappers for Python and C would take a third of the time it
#: takes to compile.
PART = {"nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
INLINED = {**PART, "forceinline": True}

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def _compiled_for(*features: str) -> bool:
    """Whether numba compiles for a processor of x86-64 that has all of these."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    compiled = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return {f"+{feature}" for feature in features} <= set(compiled.split(","))


#: Whether the processor computes CRC-32C itself; otherwise a table-driven kernel does.
HAS_CRC_INSTRUCTION = _compiled_for("sse4.2")
#: Whether it also multiplies 64 bytes without carries at once, which is faster.
HAS_FOLDING = HAS_CRC_INSTRUCTION and _compiled_for("vpclmulqdq", "avx512f")


def pointer_to(builder: Any, address: Any, to: Any) -> Any:
    """Of code that is built: an address as a pointer to a type."""
    return builder.inttoptr(address, to.as_pointer())


def _make_load(llvm_type: Any, numba_type: Any) -> Any:
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(pointer_to(builder, args[0], llvm_type), align=1)

        return numba_type(types.int64), codegen

    return intrinsic(load)


def _make_store(llvm_type: Any, numba_type: Any) -> Any:
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[1], pointer_to(builder, args[0], llvm_type), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), codegen

    return intrinsic(store)


load_u8 = _make_load(I8, types.uint8)
load_i32 = _make_load(I32, types.int32)
load_u32 = _make_load(I32, types.uint32)
load_i64 = _make_load(I64, types.int64)
load_u64 = _make_load(I64, types.uint64)
store_u8 = _make_store(I8, types.uint8)
store_i32 = _make_store(I32, types.int32)
store_i64 = _make_store(I64, types.int64)


@intrinsic
def borrow(typingctx: Any, array: Any) -> Any:
    """The same array, which nobody owns: numba counts the references to owned ones, and each count is a
    barrier to the memory accesses around it, which should overlap."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made = context.make_array(signature.return_type)(context, builder, args[0])
        made.meminfo = cgutils.get_null_value(made.meminfo.type)
        made.parent = cgutils.get_null_value(made.parent.type)
        return made._getvalue()

    return array(array), codegen


@intrinsic
def memcpy(typingctx: Any, destination: Any, source: Any, byte_count: Any) -> Any:
    """memcpy(destination, source, byte_count) on addresses."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cgutils.raw_memcpy(
            builder, pointer_to(builder, args[0], I8), pointer_to(builder, args[1], I8), args[2], 1
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


_VECTOR = ir.VectorType(I64, 4)
STREAM_BYTES = 32


@intrinsic
def stream_vector(typingctx: Any, destination: Any, source: Any) -> Any:
    """Copy 32 bytes past the caches: for results larger than these, it saves reading each line before it is
    overwritten.

    The destination is aligned to 32 bytes. Call :func:`fence` after the last one.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(pointer_to(builder, args[1], _VECTOR), align=1)
        store = builder.store(value, pointer_to(builder, args[0], _VECTOR), align=STREAM_BYTES)
        store.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def fence(typingctx: Any) -> Any:
    """Make all stores before it visible to other threads before those after it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def memzero(typingctx: Any, destination: Any, byte_count: Any) -> Any:
    """Fill memory at an address with zero bytes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cgutils.memset(builder, pointer_to(builder, args[0], I8), args[1], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def prefetch_line(builder: Any, address: Any) -> None:
    """Of code that is built: :func:`prefetch`."""
    function_type = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    builder.call(function, [pointer_to(builder, address, I8), I32(0), I32(3), I32(1)])


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Hint that the cache line at an address will be read soon; never faults."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch_line(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def popcount(typingctx: Any, word: Any) -> Any:
    """Number of set bits of a uint64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), codegen


@intrinsic
def equal_64(typingctx: Any, address: Any, value: Any) -> Any:
    """Bits of a uint64: which of the 64 unsigned integers at an address, of the type of ``value``, are
    equal to it. The first is the lowest bit."""
    vector = ir.VectorType(ir.IntType(value.bitwidth), 64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        there = builder.load(pointer_to(builder, args[0], vector), align=1)
        none = ir.Constant(vector, ir.Undefined)
        first = builder.insert_element(none, args[1], I32(0))
        all_alike = builder.shuffle_vector(first, none, ir.Constant(ir.VectorType(I32, 64), [0] * 64))
        return builder.bitcast(builder.icmp_unsigned("==", there, all_alike), I64)

    return types.uint64(types.int64, value), codegen


@intrinsic
def load_shared(typingctx: Any, address: Any) -> Any:
    """The int64 at an address that another thread writes to: loaded each time it is asked for, in order with
    atomic additions."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(pointer_to(builder, args[0], I64), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_add(typingctx: Any, address: Any, increment: Any) -> Any:
    """Add to the int64 at an address; returns the value before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", pointer_to(builder, args[0], I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


def crc32c_of(builder: Any, crc: Any, word: Any) -> Any:
    """Of code that is built: :func:`crc32c_instruction`."""
    function = builder.module.declare_intrinsic(
        "llvm.x86.sse42.crc32.64.64", (), ir.FunctionType(I64, [I64, I64])
    )
    return builder.call(function, [crc, word])


@intrinsic
def crc32c_instruction(typingctx: Any, crc: Any, word: Any) -> Any:
    """One step of CRC-32C over eight bytes with the processor's instruction (x86 SSE 4.2)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return crc32c_of(builder, *args)

    return types.uint64(types.uint64, types.uint64), codegen


def _make_call(
    return_type: Any, numba_return: Any, argument_types: list[Any], numba_arguments: list[Any]
) -> Any:
    """An intrinsic that calls the C function at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(return_type, argument_types)
        result = builder.call(builder.inttoptr(args[0], function_type.as_pointer()), list(args[1:]))
        return context.get_dummy_value() if isinstance(return_type, ir.VoidType) else result

    signature = numba_return(types.int64, *numba_arguments)
    count = len(argument_types)
    if count == 0:

        def call0(typingctx: Any, function: Any) -> Any:
            return signature, codegen

        return intrinsic(call0)
    if count == 1:

        def call1(typingctx: Any, function: Any, a: Any) -> Any:
            return signature, codegen

        return intrinsic(call1)
    if count == 2:

        def call2(typingctx: Any, function: Any, a: Any, b: Any) -> Any:
            return signature, codegen

        return intrinsic(call2)
    if count == 3:

        def call3(typingctx: Any, function: Any, a: Any, b: Any, c: Any) -> Any:
            return signature, codegen

        return intrinsic(call3)
    if count == 4:

        def call4(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
            return signature, codegen

        return intrinsic(call4)

    if count == 5:

        def call5(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
            return signature, codegen

        return intrinsic(call5)

    def call6(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
        return signature, codegen

    return intrinsic(call6)


_VOID = ir.VoidType()
call_i64 = _make_call(I64, types.int64, [], [])
call_i64_i64 = _make_call(I64, types.int64, [I64], [types.int64])
call_i32_i64 = _make_call(I32, types.int32, [I64], [types.int64])
call_i32_i64_u32 = _make_call(I32, types.int32, [I64, I32], [types.int64, types.uint32])
call_void_i64_u32 = _make_call(_VOID, types.void, [I64, I32], [types.int64, types.uint32])
call_void_i64_u64 = _make_call(_VOID, types.void, [I64, I64], [types.int64, types.uint64])
call_u32_i64_i64_u32 = _make_call(
    I32, types.uint32, [I64, I64, I32], [types.int64, types.int64, types.uint32]
)
call_prep_read = _make_call(
    _VOID,
    types.void,
    [I64, I32, I64, I32, I64],
    [types.int64, types.int32, types.int64, types.uint32, types.uint64],
)
call_prep_read_fixed = _make_call(
    _VOID,
    types.void,
    [I64, I32, I64, I32, I64, I32],
    [types.int64, types.int32, types.int64, types.uint32, types.uint64, types.int32],
)
call_pread = _make_call(
    I64, types.int64, [I32, I64, I64, I64], [types.int32, types.int64, types.int64, types.int64]
)
call_read = _make_call(I64, types.int64, [I32, I64, I64], [types.int32, types.int64, types.int64])
call_i32_i32_i64 = _make_call(I32, types.int32, [I32, I64], [types.int32, types.int64])


def function_address(library: ctypes.CDLL, name: str) -> int:
    """The address of a C function, or 0 where the library does not export it."""
    try:
        return int(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0)
    except AttributeError:
        return 0


def libc() -> ctypes.CDLL:
    """The C library of this process."""
    return ctypes.CDLL(None, use_errno=True)


def address_of(array: np.ndarray[Any, Any]) -> int:
    """The address of an array's first byte (0 for an empty array). The caller keeps the array alive."""
    return int(array.__array_interface__["data"][0]) if array.size else 0  # half the time of array.ctypes
