import numpy, minidiff as md
from tests.state_programs import *
def close(a,b,what):
    assert numpy.allclose(global_value(a),global_value(b),1e-7,1e-8), (what, global_value(a), global_value(b))
def check(program, mesh):
    args, whole = example(mesh)
    n=mesh.size
    steps,states=decoded(program)
    f=sharded(program,mesh)
    ref=of_global_values(steps,n,whole)
    out=f(*args)
    for k,(a,b) in enumerate(zip(out,ref)): close(a,b.reshape(numpy.shape(global_value(a))),f"value {k}")
    tape=md.make_tape(f)(*args); tape.check()
    for k,(a,b) in enumerate(zip(md.jit(f)(*args),ref)): close(a,b,f"jit {k}")
    loss=loss_of(program,mesh); gl=global_loss(program,n)
    every=(0,1,2,3)
    v,g=md.value_and_grad(loss,every)(*args); v2,g2=md.value_and_grad(gl,every)(*whole)
    close(v,v2,"loss")
    for k,(a,b) in enumerate(zip(g,g2)): close(a,b,f"grad {k}"); assert spmd.spec_of(a)==spmd.spec_of(args[k]).transposed() or k==0,("spec",k)
    t=md.make_tape(md.grad(loss,every))(*args); t.check()
    for k,(a,b) in enumerate(zip(md.jit(md.grad(loss,every))(*args),g2)): close(a,b,f"jit grad {k}")
    for k,(a,b) in enumerate(zip(md.grad(md.jit(loss),every)(*args),g2)): close(a,b,f"grad jit {k}")
    lin=md.linearize(f,*args)[1]
    lt=md.make_tape(lin)(*args); tt=md.transpose(lt); tt.check(); ttt=md.transpose(tt); ttt.check()
    for k,(a,b) in enumerate(zip(ttt(*args),lt(*args))): close(a,b,f"double transpose {k}")
    if not any(s.way=="vjp" for s in steps):
        un=loss_of(program,mesh,check_rep=False)
        v,g=md.value_and_grad(un,every)(*args)
        close(v,v2,"untyped")
        for k,(a,b) in enumerate(zip(g,g2)): close(a,b,f"untyped grad {k}")
