"""Sums of products of small matrices: c += a @ b in one step, where NumPy writes the product, then adds it.

A tile of c stays in the processor's registers while a loop adds up its products, columns of a times rows of b. The rows
of a and the columns of b that belong to a tile are copied first, so that what each step of the loop reads is adjacent:
columns of b, a panel, once for all tiles below each other. A kernel may add several products, of pairs of factors: then
each tile has a loop for each of them.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Iterable

import numpy

from minidiff.compiler import native
from minidiff.compiler.ir import type_of
from minidiff.core.tape import Atom
from minidiff.core.types import ShapedArray, typeof

#: The rows of c are a multiple of these bytes long, so that every processor's tiles fit. Of matrices with more
#: multiplications, NumPy's library may compute the product in several threads, and adding it takes less of the time.
ROW_BYTES, MOST_MULTIPLICATIONS = 128, 1 << 20

#: The least number of terms and of rows: with fewer, copying panels takes as long as the product.
LEAST = 16

#: The rows of a panel, which stays in the first cache. Their products are added up, then added to c: so rounding errors
#: grow no faster than those of NumPy's library.
DEPTH = 256

#: How many elements of a are copied at once. They fit into the second cache.
PLACE = 8192

#: `tile` adds to `%last + 1` rows of c. If a tile has more, they repeat the last one. q is the number of a pair.
_TILE = """define internal void @tile({arguments}, ptr %c, i64 %cm, i64 %last)
noinline {{
entry:
{loops}
{rows}
{adds}
{stores}
ret void
}}"""
_ARGUMENTS = "ptr %a.{q}, ptr %b.{q}, i64 %k.{q}"
_LOOP = """br label %loop.{q}
loop.{q}:
%i.{q} = phi i64 [ 0, %{before_end} ], [ %next.{q}, %loop.{q} ]
{sums}
%bs.{q} = getelementptr [{width} x {type}], ptr %b.{q}, i64 %i.{q}
{loads}
%as.{q} = getelementptr [{tile} x {type}], ptr %a.{q}, i64 %i.{q}
{broadcasts}
{products}
%next.{q} = add nuw nsw i64 %i.{q}, 1
%more.{q} = icmp ult i64 %next.{q}, %k.{q}
br i1 %more.{q}, label %loop.{q}, label %end.{q}
end.{q}:"""
_LOAD = """%b{v}.{q}.p = getelementptr {vector}, ptr %bs.{q}, i64 {v}
%b{v}.{q} = load {vector}, ptr %b{v}.{q}.p, align {size}"""
_BROADCAST = """%x{r}.{q}.p = getelementptr {type}, ptr %as.{q}, i64 {r}
%x{r}.{q} = load {type}, ptr %x{r}.{q}.p
%x{r}.{q}.0 = insertelement {vector} poison, {type} %x{r}.{q}, i64 0
%x{r}.{q}.v = shufflevector {vector} %x{r}.{q}.0, {vector} poison, <{lanes} x i32> zeroinitializer"""
_FIRST_SUM = "%s{r}.{v}.{q} = phi {vector} [ zeroinitializer, %entry ], [ %t{r}.{v}.{q}, %loop.{q} ]"
_SUM = "%s{r}.{v}.{q} = phi {vector} [ %t{r}.{v}.{earlier}, %{before_end} ], [ %t{r}.{v}.{q}, %loop.{q} ]"
_PRODUCT = "%t{r}.{v}.{q} = call {vector} @{muladd}({vector} %x{r}.{q}.v, {vector} %b{v}.{q}, {vector} %s{r}.{v}.{q})"
_ROW = """%r{r} = call i64 @llvm.smin.i64(i64 {r}, i64 %last)
%rc{r} = mul i64 %r{r}, %cm
%c{r} = getelementptr i8, ptr %c, i64 %rc{r}"""
_ADD = """%c{r}.{v}.p = getelementptr {vector}, ptr %c{r}, i64 {v}
%c{r}.{v} = load {vector}, ptr %c{r}.{v}.p, align {size}
%u{r}.{v} = fadd {vector} %c{r}.{v}, %t{r}.{v}.{q}"""
_STORE = "store {vector} %u{r}.{v}, ptr %c{r}.{v}.p, align {size}"

#: `kernel` is what NumPy calls: for as many terms as a panel has rows, and for as many rows of a as there is place for,
#: it copies these; then, for each panel of b, it computes the tiles. (More terms than that has only a pair alone.)
_KERNEL = """define void @kernel(ptr %args, ptr %sizes, ptr %steps, ptr %unused) {{
entry:
%panels = alloca [{depth} x [{width} x {type}]], align 64
%copies = alloca [{place} x {type}], align 64
{given}
%bottom = sub i64 %m, 1
br label %depths
depths:
%p = phi i64 [ 0, %entry ], [ %p.next, %depths.end ]
{depths}
%tiles.fit = udiv i64 {tiles_fit}, %deep.sum.{pairs}
%rows.fit = mul i64 %tiles.fit, {tile}
br label %blocks
blocks:
%h = phi i64 [ 0, %depths ], [ %h.next, %blocks.end ]
%lower = sub i64 %m, %h
%high = call i64 @llvm.smin.i64(i64 %lower, i64 %rows.fit)
%rounded = add i64 %high, {beyond}
%tiles = udiv i64 %rounded, {tile}
%pa.0 = getelementptr i8, ptr %copies, i64 0
{copies}
br label %columns
columns:
%j = phi i64 [ 0, %copied.{q} ], [ %j.next, %columns.end ]
%c.h = mul i64 %h, %cm
%c.block = getelementptr i8, ptr %c, i64 %c.h
%c.j = getelementptr {type}, ptr %c.block, i64 %j
%pb.0 = getelementptr i8, ptr %panels, i64 0
{panels}
br label %rows
rows:
%t = phi i64 [ 0, %filled.{q} ], [ %t.next, %rows ]
%i = mul i64 %t, {tile}
%below = sub i64 %high, %i
%in.tile = call i64 @llvm.smin.i64(i64 %below, i64 {tile})
%last = sub i64 %in.tile, 1
{tiles}
%ci = mul i64 %i, %cm
%c.i = getelementptr i8, ptr %c.j, i64 %ci
call void @tile({of_tile}, ptr %c.i, i64 %cm, i64 %last)
%t.next = add i64 %t, 1
%t.more = icmp slt i64 %t.next, %tiles
br i1 %t.more, label %rows, label %columns.end
columns.end:
%j.next = add i64 %j, {width}
%j.more = icmp slt i64 %j.next, %n
br i1 %j.more, label %columns, label %blocks.end
blocks.end:
%h.next = add i64 %h, %rows.fit
%h.more = icmp slt i64 %h.next, %m
br i1 %h.more, label %blocks, label %depths.end
depths.end:
%p.next = add i64 %p, {depth}
%p.more = icmp slt i64 %p.next, %k.0
br i1 %p.more, label %depths, label %end
end:
ret void
}}
declare i64 @llvm.smin.i64(i64, i64)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare {vector} @{muladd}({vector}, {vector}, {vector})"""
_DEPTH = """%rest.{q} = sub i64 %k.{q}, %p
%deep.{q} = call i64 @llvm.smin.i64(i64 %rest.{q}, i64 {depth})
%deep.sum.{later} = add i64 %deep.sum.{q}, %deep.{q}"""
_COPY = """%ap.{q} = mul i64 %p, %ak.{q}
%a.{q}.p = getelementptr i8, ptr %a.{q}, i64 %ap.{q}
br label %copy.tiles.{q}
copy.tiles.{q}:
%ct.{q} = phi i64 [ 0, %{before_copied} ], [ %ct.{q}.next, %copy.tile.end.{q} ]
%ctr.{q} = mul i64 %ct.{q}, {tile}
%row.{q} = add i64 %ctr.{q}, %h
{row_addresses}
%cto.{q} = mul i64 %ct.{q}, %deep.{q}
%copied.to.{q} = getelementptr [{tile} x {type}], ptr %pa.{q}, i64 %cto.{q}
br label %copy.{q}
copy.{q}:
%ck.{q} = phi i64 [ 0, %copy.tiles.{q} ], [ %ck.{q}.next, %copy.{q} ]
%along.{q} = mul i64 %ck.{q}, %ak.{q}
%to.{q} = getelementptr [{tile} x {type}], ptr %copied.to.{q}, i64 %ck.{q}
{elements}
%ck.{q}.next = add nuw nsw i64 %ck.{q}, 1
%ck.{q}.more = icmp ult i64 %ck.{q}.next, %deep.{q}
br i1 %ck.{q}.more, label %copy.{q}, label %copy.tile.end.{q}
copy.tile.end.{q}:
%ct.{q}.next = add i64 %ct.{q}, 1
%ct.{q}.more = icmp slt i64 %ct.{q}.next, %tiles
br i1 %ct.{q}.more, label %copy.tiles.{q}, label %copied.{q}
copied.{q}:
%copied.size.{q} = mul i64 %tiles, %deep.{q}
%pa.{later} = getelementptr [{tile} x {type}], ptr %pa.{q}, i64 %copied.size.{q}"""
_ROW_ADDRESS = """%row{r}.{q}.any = add i64 %row.{q}, {r}
%row{r}.{q} = call i64 @llvm.smin.i64(i64 %row{r}.{q}.any, i64 %bottom)
%down{r}.{q} = mul i64 %row{r}.{q}, %am.{q}
%ra{r}.{q} = getelementptr i8, ptr %a.{q}.p, i64 %down{r}.{q}"""
_ELEMENT = """%from{r}.{q} = getelementptr i8, ptr %ra{r}.{q}, i64 %along.{q}
%e{r}.{q} = load {type}, ptr %from{r}.{q}
%to{r}.{q} = getelementptr {type}, ptr %to.{q}, i64 {r}
store {type} %e{r}.{q}, ptr %to{r}.{q}"""
_PANEL = """%b.{q}.j = getelementptr {type}, ptr %b.{q}, i64 %j
%bp.{q} = mul i64 %p, %bk.{q}
%b.{q}.p = getelementptr i8, ptr %b.{q}.j, i64 %bp.{q}
br label %fill.{q}
fill.{q}:
%q.{q} = phi i64 [ 0, %{before_filled} ], [ %q.{q}.next, %fill.{q} ]
%bq.{q} = mul i64 %q.{q}, %bk.{q}
%b.from.{q} = getelementptr i8, ptr %b.{q}.p, i64 %bq.{q}
%b.to.{q} = getelementptr [{width} x {type}], ptr %pb.{q}, i64 %q.{q}
call void @llvm.memcpy.p0.p0.i64(ptr align {size} %b.to.{q}, ptr align {size} %b.from.{q}, i64 {bytes}, i1 false)
%q.{q}.next = add i64 %q.{q}, 1
%q.{q}.more = icmp slt i64 %q.{q}.next, %deep.{q}
br i1 %q.{q}.more, label %fill.{q}, label %filled.{q}
filled.{q}:
%pb.{later} = getelementptr [{width} x {type}], ptr %pb.{q}, i64 %deep.{q}"""
_OF_TILE = """%ai.{q} = mul i64 %t, %deep.{q}
%a.{q}.i = getelementptr [{tile} x {type}], ptr %pa.{q}, i64 %ai.{q}"""
_OF_TILE_ARGUMENTS = "ptr %a.{q}.i, ptr %pb.{q}, i64 %deep.{q}"

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


def product_text(dtype: numpy.dtype, pairs: int = 1) -> str:
    """The module of c += a @ b, or of the same with so many pairs of factors."""
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
        "place": PLACE,
        "tiles_fit": PLACE // tile,
        "beyond": tile - 1,
        "pairs": pairs,
        "muladd": f"llvm.fmuladd.v{lanes}f{8 * size}",
    }

    def each(
        template: str, q: int, rows: Iterable[int] = range(tile), columns: Iterable[int] = range(vectors), **more: str
    ) -> str:
        firsts = {"end": "entry", "copied": "blocks", "filled": "columns"}  # the blocks before those of pair 0
        before = {f"before_{x}": f"{x}.{q - 1}" if q else first for x, first in firsts.items()}
        place = {"q": q, "earlier": q - 1, "later": q + 1, **before, **texts, **more}
        return "\n".join(template.format(r=r, v=v, **place) for r in rows for v in columns)

    def loop(q: int) -> str:
        parts = {
            "sums": each(_SUM if q else _FIRST_SUM, q),
            "loads": each(_LOAD, q, rows=[0]),
            "broadcasts": each(_BROADCAST, q, columns=[0]),
            "products": each(_PRODUCT, q),
        }
        return each(_LOOP, q, [0], [0], **parts)

    def copy(q: int) -> str:
        parts = {"row_addresses": each(_ROW_ADDRESS, q, columns=[0]), "elements": each(_ELEMENT, q, columns=[0])}
        return each(_COPY, q, [0], [0], **parts)

    def of_pairs(template: str, separator: str = "\n") -> str:
        return separator.join(each(template, q, [0], [0]) for q in range(pairs))

    step = 2 * pairs + 2  # the first step within operands
    given = [("ptr", "args", 2 * pairs, "c"), ("i64", "sizes", 1, "m"), ("i64", "sizes", 3, "n")]
    given.append(("i64", "steps", step + 4 * pairs, "cm"))
    for q in range(pairs):
        given += [("ptr", "args", 2 * q + k, f"{x}.{q}") for k, x in enumerate("ab")]
        given.append(("i64", "sizes", q + 3 if q else 2, f"k.{q}"))
        given += [("i64", "steps", step + 4 * q + k, f"{x}.{q}") for k, x in enumerate(("am", "ak", "bk"))]
    blocks = {
        "arguments": of_pairs(_ARGUMENTS, ", "),
        "rows": each(_ROW, 0, columns=[0]),
        "loops": "\n".join(map(loop, range(pairs))),
        "adds": each(_ADD, pairs - 1),
        "stores": each(_STORE, 0),
        "given": "\n".join(_GIVEN.format(t=t, source=source, k=k, x=x) for t, source, k, x in given),
        "depths": "%deep.sum.0 = add i64 0, 0\n" + of_pairs(_DEPTH),
        "copies": "\n".join(map(copy, range(pairs))),
        "panels": of_pairs(_PANEL),
        "tiles": of_pairs(_OF_TILE),
        "of_tile": of_pairs(_OF_TILE_ARGUMENTS, ", "),
    }
    return "\n\n".join([text.format(q=pairs - 1, **texts, **blocks) for text in (_TILE, _KERNEL)])


def fits(a: ShapedArray, b: ShapedArray) -> bool:
    """Whether the product of two matrices is one that `add_product` adds faster than NumPy."""
    if not (a.ndim == b.ndim == 2 and a.dtype == b.dtype and a.dtype.name in ("float32", "float64")):
        return False
    (m, k), n = a.shape, b.shape[1]
    return min(m, k) >= LEAST and n * b.dtype.itemsize % ROW_BYTES == 0 < n and m * k * n <= MOST_MULTIPLICATIONS


def fit_together(b: Atom, d: Atom) -> bool:
    """Whether the second factors of two products fit into one panel, so that one kernel adds both."""
    return sum(typeof(x).shape[0] for x in (b, d)) <= DEPTH


def sum_products(*factors: numpy.ndarray) -> numpy.ndarray:
    """The sum of the products of pairs of matrices."""
    a, b = factors[:2]
    return add_product(numpy.zeros((len(a), b.shape[1]), a.dtype), *factors)


def add_product(c: numpy.ndarray, *factors: numpy.ndarray) -> numpy.ndarray:
    """Add the products of one or two pairs of matrices to another matrix, and return that.

    NumPy computes them if elements of rows are not adjacent.
    """
    adjacent = c.strides[1] == factors[1].strides[1] == factors[-1].strides[1] == c.itemsize
    if adjacent and c.flags.aligned and c.dtype.isnative:
        _adding(c.dtype, len(factors) // 2)(*factors, c)
    else:  # the kernel would get a copy of c
        for a, b in zip(factors[::2], factors[1::2]):
            numpy.add(c, a @ b, out=c)
    return c


@functools.cache
def _adding(dtype: numpy.dtype, pairs: int) -> numpy.ufunc:
    """A generalized ufunc that adds products of its other operands to its last one; its result has no meaning."""
    address = native.load_function(product_text(dtype, pairs), "kernel")
    factors = ",".join(f"(m,k{q}),(k{q},n)" for q in range(pairs))
    return native.make_ufunc(
        "matmul", address, [dtype] * (2 * pairs + 1), [dtype], f"{factors},(m,n)->()", ctypes.c_int64(0)
    )
