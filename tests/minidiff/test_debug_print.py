"""`md.debug.print` in any program, whatever is done with it; `debug_print.md` shows the lines of some."""

import contextlib
import functools
import io

from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as np
from collectives import pmean, psum
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each

# ---------------------------------------------------------------- programs that print

X, XS = np.arange(4.0), np.array([0.5, 1.5])


def in_loop(say, x):
    return md.scan(lambda c, e: (say("step {} {}", c, e) * e, None), x, XS)[0]


def in_branch(say, x):
    return md.cond(x > 1, lambda x: say("large {}", x) / 2, lambda x: 2 * say("small {}", x), x)


def in_while(say, x):
    return (md.while_loop(lambda c: c < 4, lambda c: 2 * say("while {}", c) + 1, x), x)[1]


#: Statements, each `(say, x) -> x`, where `say` prints and returns its first argument.
STATEMENTS = {
    "compute": lambda say, x: np.sin(x) + 2 * x,
    "print": lambda say, x: say("x = {} {y}", x, y=x),
    "print the same": lambda say, x: (say("x = {}", x), say("x = {}", x))[1],
    "print a constant": lambda say, x: (say("{} and {}", 1, "text"), x)[1],
    "print what nothing needs": lambda say, x: (say("{}", np.exp(x) + 1), x)[1],
    "in a loop": in_loop,
    "in a loop, the same in each step": lambda say, x: md.scan(
        lambda c, e: (c * np.sin(say("same {} {}", x, np.sin(x))) * e, None), x, XS
    )[0],
    "in a loop that nothing needs": lambda say, x: (in_loop(say, x), x)[1],
    "in a branch": in_branch,
    "in a while loop": in_while,
    "in a checkpoint": lambda say, x: md.checkpoint(lambda x: in_loop(say, np.sin(x)))(x),
    "in a compiled function": lambda say, x: md.jit(lambda x: say("jit {}", x) * x)(x),
}


def program(names, say, x):
    for name in names:
        x = STATEMENTS[name](say, x)
    return x


def say(text, *args, **kwargs):
    md.debug.print(text, *args, **kwargs)
    return args[0]


def say_in_python(text, *args, **kwargs):
    print(text.format(*args, **kwargs))
    return args[0]


#: What is done with a program: each is to print what the program prints, once, in its order.
USES = {
    "call": lambda f, x: f(x),
    "jit": lambda f, x: md.jit(f)(x),
    "grad": lambda f, x: md.grad(f)(x),
    "jit of grad": lambda f, x: md.jit(md.grad(f))(x),
    "grad of jit": lambda f, x: md.grad(md.jit(f))(x),
    "jit of linearize": lambda f, x: md.jit(lambda x: md.linearize(f, x)[1](1.0))(x),
    "hessian": lambda f, x: md.jit(md.grad(md.grad(f)))(x),
    "jvp": lambda f, x: md.jvp(f, (x,), (1.0,)),
    "tape": lambda f, x: md.make_tape(md.grad(f))(x)(x),
    "vmap": lambda f, x: md.jit(md.vmap(f))(np.array([x])),
    "debug_nans": lambda f, x: md.debug_nans()(md.jit(md.grad(f)))(x),
}


#: Those that reverse mode takes part in, which refuses while loops, or that need numbers for their condition.
NO_WHILE = ("grad", "jit of grad", "grad of jit", "hessian", "tape", "debug_nans", "vmap")


def printed(f, *args):
    """The lines that a call prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        f(*args)
    return out.getvalue().splitlines()


def rounded(lines):
    """Printed lines with their numbers to a few digits: compiled programs compute in another order."""
    return [[f"{float(w):.6g}" if w.lstrip("-")[:1].isdigit() else w for w in line.split()] for line in lines]


@given(
    st.lists(st.sampled_from(sorted(STATEMENTS)), min_size=1, max_size=4),
    st.sampled_from(sorted(USES)),
    st.sampled_from([0.25, 1.25]),
)
@settings(max_examples=40, deadline=None)
def test_prints_are_those_of_the_program(names, use, x):
    if use in NO_WHILE:
        names = [name for name in names if name != "in a while loop"]
    if use == "vmap":  # where both branches are computed
        names = [name for name in names if name != "in a branch"]
    with md.disable_jit():  # loops are Python's
        expected = printed(functools.partial(program, names, say_in_python), np.float64(x))
    assert rounded(printed(USES[use], functools.partial(program, names, say), x)) == rounded(expected)


# ---------------------------------------------------------------- on ranks

MESH = mesh(2)
RANKS = ["rank 0 at mesh coordinates (i,) = (0,): ", "rank 1 at mesh coordinates (i,) = (1,): "]


def body(w, x):
    md.debug.print("x = {}", x)
    total = psum((w * x).sum(), "i")
    md.debug.print("total = {}", total)

    def step(c, e):
        md.debug.print("c = {:.1f}, e = {:.1f}", c, e)
        return pmean(c * e, "i"), None

    return md.scan(step, total, x)[0]


@each("options", [{}, {"check_rep": False}], ids=str)
@each("use", [use for use in sorted(USES) if use != "vmap"])
def test_each_rank_prints_its_own_blocks_after_its_name(use, options):
    f = mapped(body, MESH, (P(), P("i")), P(), **options)
    actual = printed(USES[use], lambda w: f(w, X), 0.5)
    steps = [[(3.0, 0.0), (3.0, 2.0)], [(3.0, 1.0), (3.0, 3.0)]]
    lines = [("x = [0. 1.]", "x = [2. 3.]"), ("total = 3.0",) * 2]
    lines += [tuple(f"c = {c:.1f}, e = {e:.1f}" for c, e in row) for row in steps]
    assert actual == [rank + text for row in lines for rank, text in zip(RANKS, row)]


def moved(w, x):
    """A body whose sums the compiler moves and joins, across prints."""
    a, b = say("{:.6f}", w), psum(x.sum(), "i")
    c = np.sin(say("{:.6f}", a * x[0]))
    d, e = psum(c, "i"), say("sum {:.6f}", psum(x[0], "i"))
    return pmean(a + say("again {:.6f}", b * d) + md.checkpoint(lambda a: say("{:.6f}", np.sin(a)))(d) + e, "i")


@each("use", [md.grad, md.jit, lambda f: md.jit(md.value_and_grad(f))])
def test_the_compiler_keeps_prints_in_order_where_it_moves_communication(use):
    f = mapped(moved, MESH, (P(), P("i")), P())
    expected = printed(f, 0.3, X / 4)
    assert len(expected) == 10 and printed(use(f), 0.3, X / 4) == expected
