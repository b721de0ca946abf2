"""Instructions that numba has no word for: copies, stores past the caches, prefetches."""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

CACHE_LINE = 64


def _copy_code(typing_context: Any, target: Any, source: Any, num_bytes: Any) -> Any:

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        to, origin = (builder.inttoptr(address, pointer) for address in args[:2])
        cgutils.raw_memcpy(builder, to, origin, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _stream_code(typing_context: Any, target: Any, source: Any) -> Any:

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), CACHE_LINE // 8).as_pointer()
        to, origin = (builder.inttoptr(address, line) for address in args)
        store = builder.store(builder.load(origin, align=1), to, align=CACHE_LINE)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _fence_code(typing_context: Any) -> Any:

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


def _prefetch_line_code(typing_context: Any, address: Any) -> Any:

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _prefetch(builder, builder.inttoptr(args[0], ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _prefetch_row_code(typing_context: Any, array_NC: types.Array, row: types.Integer) -> Any:

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array_type = signature.args[0]
        array = context.make_array(array_type)(context, builder, args[0])
        zero = context.get_constant(types.intp, 0)
        pointer = cgutils.get_item_pointer(context, builder, array_type, array, [args[1], zero])
        _prefetch(builder, builder.bitcast(pointer, ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(array_NC, types.intp), codegen


def _prefetch(builder: Any, pointer: Any) -> None:
    int32 = ir.IntType(32)
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [pointer.type, int32, int32, int32]),
        "llvm.prefetch.p0",
    )
    read, high_locality, data = int32(0), int32(3), int32(1)
    builder.call(function, [pointer, read, high_locality, data])


# pyrefly: ignore[bad-assignment] (numba types its decorator as a factory)
copy_bytes: Callable[[int, int, int], None] = intrinsic(_copy_code)
"""memcpy between two addresses."""


# pyrefly: ignore[bad-assignment] (numba types its decorator as a factory)
stream_line: Callable[[int, int], None] = intrinsic(_stream_code)
"""Copies 64 bytes to the cache line at an address, past the caches."""


# pyrefly: ignore[bad-assignment] (numba types its decorator as a factory)
fence: Callable[[], None] = intrinsic(_fence_code)
"""Other threads and devices see what was streamed before."""


# pyrefly: ignore[bad-assignment] (numba types its decorator as a factory)
prefetch_line: Callable[[int], None] = intrinsic(_prefetch_line_code)
"""Asks for the cache line at an address before it is needed; never faults."""


# pyrefly: ignore[bad-assignment] (numba types its decorator as a factory)
prefetch_row: Callable[[np.ndarray, np.int64], None] = intrinsic(_prefetch_row_code)
"""Asks for the first cache line of a row of a two-dimensional array before it is needed."""
