"""Sums of products of small matrices: c += a @ b in one step, where NumPy writes the product, then adds it.

A tile of c stays in the processor's registers while a loop adds up its products, columns of a times rows of b. The
columns of b that belong to a tile, its panel, are copied first, so that what each step of the loop reads is adjacent.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Iterable

import numpy

from minidiff.compiler import native
from minidiff.compiler.ir import type_of
from minidiff.core.types import ShapedArray

#: The rows of c are a multiple of these bytes long, so that every processor's tiles fit. Of matrices with more
#: multiplications, NumPy's library may compute the product in several threads, and adding it takes less of the time.
ROW_BYTES, MOST_MULTIPLICATIONS = 128, 1 << 20

#: The least number of terms and of rows: with fewer, copying panels takes as long as the product.
LEAST = 16

#: The rows of a panel, which stays in the first cache. Their products are added up, then added to c: so rounding errors
#: grow no faster than those of NumPy's library.
DEPTH = 256

#: `tile` computes `%last + 1` rows of c. Those of a tile that are beyond repeat the last one.
_TILE = """define internal void @tile(ptr %a, i64 %am, i64 %ak, ptr %panel, i64 %k, ptr %c, i64 %cm, i64 %last)
noinline {{
entry:
{rows}
br label %loop
loop:
%i = phi i64 [ 0, %entry ], [ %next, %loop ]
{sums}
%b = getelementptr [{width} x {type}], ptr %panel, i64 %i
{loads}
%along = mul i64 %i, %ak
{broadcasts}
{products}
%next = add nuw nsw i64 %i, 1
%more = icmp ult i64 %next, %k
br i1 %more, label %loop, label %end
end:
{adds}
{stores}
ret void
}}"""
_ROW = """%r{r} = call i64 @llvm.smin.i64(i64 {r}, i64 %last)
%ra{r} = mul i64 %r{r}, %am
%a{r} = getelementptr i8, ptr %a, i64 %ra{r}
%rc{r} = mul i64 %r{r}, %cm
%c{r} = getelementptr i8, ptr %c, i64 %rc{r}"""
_LOAD = """%b{v}.p = getelementptr {vector}, ptr %b, i64 {v}
%b{v} = load {vector}, ptr %b{v}.p, align {size}"""
_BROADCAST = """%x{r}.p = getelementptr i8, ptr %a{r}, i64 %along
%x{r} = load {type}, ptr %x{r}.p
%x{r}.0 = insertelement {vector} poison, {type} %x{r}, i64 0
%x{r}.v = shufflevector {vector} %x{r}.0, {vector} poison, <{lanes} x i32> zeroinitializer"""
_SUM = "%s{r}.{v} = phi {vector} [ zeroinitializer, %entry ], [ %t{r}.{v}, %loop ]"
_PRODUCT = "%t{r}.{v} = call {vector} @{muladd}({vector} %x{r}.v, {vector} %b{v}, {vector} %s{r}.{v})"
_ADD = """%c{r}.{v}.p = getelementptr {vector}, ptr %c{r}, i64 {v}
%c{r}.{v} = load {vector}, ptr %c{r}.{v}.p, align {size}
%u{r}.{v} = fadd {vector} %c{r}.{v}, %t{r}.{v}"""
_STORE = "store {vector} %u{r}.{v}, ptr %c{r}.{v}.p, align {size}"

#: `kernel` is what NumPy calls: for each panel of b, all tiles of c that it belongs to.
_KERNEL = """define void @kernel(ptr %args, ptr %sizes, ptr %steps, ptr %unused) {{
entry:
%panel = alloca [{depth} x [{width} x {type}]], align 64
{given}
br label %columns
columns:
%j = phi i64 [ 0, %entry ], [ %j.next, %columns.end ]
%b.j = getelementptr {type}, ptr %b, i64 %j
%c.j = getelementptr {type}, ptr %c, i64 %j
br label %depths
depths:
%p = phi i64 [ 0, %columns ], [ %p.next, %depths.end ]
%rest = sub i64 %k, %p
%deep = call i64 @llvm.smin.i64(i64 %rest, i64 {depth})
%bp = mul i64 %p, %bk
%b.p = getelementptr i8, ptr %b.j, i64 %bp
%ap = mul i64 %p, %ak
%a.p = getelementptr i8, ptr %a, i64 %ap
br label %copy
copy:
%q = phi i64 [ 0, %depths ], [ %q.next, %copy ]
%bq = mul i64 %q, %bk
%from = getelementptr i8, ptr %b.p, i64 %bq
%to = getelementptr [{width} x {type}], ptr %panel, i64 %q
call void @llvm.memcpy.p0.p0.i64(ptr align {size} %to, ptr align {size} %from, i64 {bytes}, i1 false)
%q.next = add nuw nsw i64 %q, 1
%q.more = icmp ult i64 %q.next, %deep
br i1 %q.more, label %copy, label %rows
rows:
%i = phi i64 [ 0, %copy ], [ %i.next, %rows ]
%below = sub i64 %m, %i
%high = call i64 @llvm.smin.i64(i64 %below, i64 {tile})
%last = sub i64 %high, 1
%ai = mul i64 %i, %am
%a.i = getelementptr i8, ptr %a.p, i64 %ai
%ci = mul i64 %i, %cm
%c.i = getelementptr i8, ptr %c.j, i64 %ci
call void @tile(ptr %a.i, i64 %am, i64 %ak, ptr %panel, i64 %deep, ptr %c.i, i64 %cm, i64 %last)
%i.next = add i64 %i, {tile}
%i.more = icmp slt i64 %i.next, %m
br i1 %i.more, label %rows, label %depths.end
depths.end:
%p.next = add i64 %p, {depth}
%p.more = icmp slt i64 %p.next, %k
br i1 %p.more, label %depths, label %columns.end
columns.end:
%j.next = add i64 %j, {width}
%j.more = icmp slt i64 %j.next, %n
br i1 %j.more, label %columns, label %end
end:
ret void
}}
declare i64 @llvm.smin.i64(i64, i64)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare {vector} @{muladd}({vector}, {vector}, {vector})"""

#: What NumPy passes: addresses, sizes, and steps in bytes.
_GIVEN = """%{x}.given = getelementptr {t}, ptr %{source}, i64 {k}
%{x} = load {t}, ptr %{x}.given"""


def _registers() -> tuple[int, int, int]:
    """The bytes of the processor's vectors, and the rows and vectors of a tile, which fits into its registers."""
    features = native.processor()[1].split(",")
    if "+avx512f" in features:
        return 64, 8, 2
    if platform.machine().lower() in ("arm64", "aarch64"):
        return 16, 8, 2
    return (32 if "+avx" in features else 16), 4, 2  # these have 16 registers, and the others 32


def product_text(dtype: numpy.dtype) -> str:
    """The module of c += a @ b."""
    vector_bytes, tile, vectors = _registers()
    size, type_ = dtype.itemsize, type_of(dtype)
    lanes = vector_bytes // size
    texts = {
        "type": type_,
        "size": size,
        "lanes": lanes,
        "vector": f"<{lanes} x {type_}>",
        "tile": tile,
        "width": lanes * vectors,
        "bytes": vector_bytes * vectors,
        "depth": DEPTH,
        "muladd": f"llvm.fmuladd.v{lanes}f{8 * size}",
    }

    def each(template: str, rows: Iterable[int] = range(tile), columns: Iterable[int] = range(vectors)) -> str:
        return "\n".join(template.format(r=r, v=v, **texts) for r in rows for v in columns)

    given = [
        *[("ptr", "args", k, x) for k, x in enumerate("abc")],
        *[("i64", "sizes", k, x) for k, x in enumerate("mkn", start=1)],
        *[("i64", "steps", k, x) for k, x in enumerate(("am", "ak", "bk", "bn", "cm"), start=4)],
    ]
    blocks = {
        "rows": each(_ROW, columns=[0]),
        "sums": each(_SUM),
        "loads": each(_LOAD, rows=[0]),
        "broadcasts": each(_BROADCAST, columns=[0]),
        "products": each(_PRODUCT),
        "adds": each(_ADD),
        "stores": each(_STORE),
        "given": "\n".join(_GIVEN.format(t=t, source=source, k=k, x=x) for t, source, k, x in given),
    }
    return "\n\n".join([text.format(**texts, **blocks) for text in (_TILE, _KERNEL)])


def fits(a: ShapedArray, b: ShapedArray) -> bool:
    """Whether the product of two matrices is one that `add_product` adds faster than NumPy."""
    if not (a.ndim == b.ndim == 2 and a.dtype == b.dtype and a.dtype.name in ("float32", "float64")):
        return False
    (m, k), n = a.shape, b.shape[1]
    return min(m, k) >= LEAST and n * b.dtype.itemsize % ROW_BYTES == 0 < n and m * k * n <= MOST_MULTIPLICATIONS


def add_product(c: numpy.ndarray, a: numpy.ndarray, b: numpy.ndarray) -> numpy.ndarray:
    """Add the product of two matrices to a third, and return that; NumPy does if elements of rows are not adjacent."""
    rows = b.strides[1] == c.strides[1] == c.itemsize
    if rows and c.flags.aligned and c.dtype.isnative:  # otherwise NumPy would pass a copy of c
        _adding_product(c.dtype)(a, b, c)
    else:
        numpy.add(c, a @ b, out=c)
    return c


@functools.cache
def _adding_product(dtype: numpy.dtype) -> numpy.ufunc:
    """A generalized ufunc that adds the product of its first two operands to the third; its result has no meaning."""
    address = native.load_function(product_text(dtype), "kernel")
    return native.make_ufunc("matmul", address, [dtype] * 3, [dtype], "(m,k),(k,n),(m,n)->()", ctypes.c_int64(0))
