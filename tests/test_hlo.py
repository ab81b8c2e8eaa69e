"""Reading of compiled programs: what is a kernel, what it moves, and what it is."""

import jax
import jax.numpy as jnp
import pytest

from infer.aot import findings, hlo

TEXT = """\
HloModule jit_f, is_scheduled=true

FileNames
1 "/home/me/poss_jax/model/layers.py"
2 "/home/me/poss_jax/model/target.py"

FunctionNames
1 "linear"
2 "verify"

FileLocations
1 {file_name_id=2 function_name_id=2 line=7 end_line=7 column=1 end_column=2}
2 {file_name_id=1 function_name_id=1 line=90 end_line=90 column=1 end_column=2}
3 {file_name_id=1 function_name_id=1 line=96 end_line=96 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}

%moved (p: bf16[4,8]) -> bf16[8,4] {
  %p = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %t = bf16[8,4]{1,0:T(8,128)(2,1)} transpose(%p), dimensions={1,0}
}

%written (c: bf16[64,8], n: bf16[1,8], i: s32[]) -> bf16[64,8] {
  %c = bf16[64,8]{1,0} parameter(0)
  %n = bf16[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  ROOT %d = bf16[64,8]{1,0} dynamic-update-slice(%c, %n, %i, %z)
}

%joined (a: bf16[64,8], b: bf16[1,8]) -> bf16[65,8] {
  %a = bf16[64,8]{1,0} parameter(0)
  %b = bf16[1,8]{1,0} parameter(1)
  ROOT %j = bf16[65,8]{1,0} concatenate(%a, %b), dimensions={0}
}

%summed (w: bf16[64,8], x: bf16[1,8]) -> bf16[64] {
  %w = bf16[64,8]{1,0} parameter(0)
  %x = bf16[1,8]{1,0} parameter(1)
  %m = bf16[64,8]{1,0} multiply(%w, %x)
  %o = bf16[] constant(0)
  ROOT %r = bf16[64]{0} reduce(%m, %o), dimensions={1}, to_apply=%add
}

%body (s: (s32[], bf16[64,8])) -> (s32[], bf16[64,8]) {
  %s = (s32[], bf16[64,8]{1,0}) parameter(0)
  %g = bf16[64,8]{1,0} get-tuple-element(%s), index=1
  %e = s32[] get-tuple-element(%s), index=0
  %wide = f32[64,8]{1,0} convert(%g), backend_config={"window_config":{"estimated_cycles":"10"}}
  ROOT %u = (s32[], bf16[64,8]{1,0}) tuple(%e, %g)
}

%condition (s.1: (s32[], bf16[64,8])) -> pred[] {
  %s.1 = (s32[], bf16[64,8]{1,0}) parameter(0)
  ROOT %y = pred[] constant(true)
}

ENTRY %main (cache: bf16[64,8], row: bf16[1,8], at: s32[], x.1: bf16[4,8]) -> bf16[65,8] {
  %cache = bf16[64,8]{1,0} parameter(0)
  %row = bf16[1,8]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %x.1 = bf16[4,8]{1,0} parameter(3)
  %fast = (bf16[64,8]{1,0:S(1)}, bf16[64,8]{1,0}, u32[]{:S(2)}) copy-start(%cache)
  %here = bf16[64,8]{1,0:S(1)} copy-done(%fast)
  %f.1 = bf16[8,4]{1,0} fusion(%x.1), kind=kLoop, calls=%moved, metadata={MOVED
  %f.2 = bf16[64,8]{1,0} fusion(%cache, %row, %at), kind=kLoop, calls=%written
  %f.3 = bf16[64]{0} fusion(%f.2, %row), kind=kLoop, calls=%summed, metadata={SUMMED
  %k = (f32[1,40]{1,0}, s32[1,40]{1,0}) sort(%v, %w.1), dimensions={1}, to_apply=%less
  %t.1 = (s32[], bf16[64,8]{1,0}) tuple(%at, %f.2)
  %l = (s32[], bf16[64,8]{1,0}) while(%t.1), condition=%condition, body=%body
  %g.1 = bf16[64,8]{1,0} get-tuple-element(%l), index=1
  %r.1 = bf16[64,8]{0,1} copy(%g.1)
  %a.1 = bf16[64,8]{1,0} all-reduce(%g.1), to_apply=%add
  ROOT %f.4 = bf16[65,8]{1,0} fusion(%a.1, %row), kind=kLoop, calls=%joined
}
""".replace(
    "MOVED",
    'op_name="jit(f)/verify/Layer.q/q/transpose" stack_frame_id=3}, '
    'backend_config={"window_config":{"estimated_cycles":"100"}}',
).replace("SUMMED", 'op_name="jit(f)/draft/level_0/jit(_take)/mul" stack_frame_id=1}')


@pytest.fixture
def program() -> hlo.Program:
    return hlo.Program(TEXT, trips=3)


def names(places):
    return [place.op.name for place in places]


def find(program: hlo.Program, name: str) -> hlo.Place:
    return next(place for place in program.kernels() if place.op.name == name)


def test_kernels_are_what_the_entry_and_its_loops_run(program):
    kernels = ["fast", "f.1", "f.2", "f.3", "k", "r.1", "a.1", "f.4", "wide"]
    assert names(program.kernels()) == kernels
    assert names(program.loops()) == ["l"]
    assert names(program.kernels("body")) == ["wide"]
    assert sum(findings.count_kernels(program).values()) == len(kernels)


def test_loops_count_as_often_as_they_run(program):
    assert sum(findings.cycles_by(program).values()) == 100 + 3 * 10
    assert sum(findings.cycles_by(hlo.Program(TEXT)).values()) == 110
    known = TEXT.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    assert sum(findings.cycles_by(hlo.Program(known, trips=3)).values()) == 100 + 7 * 10


def test_source_names_the_line_and_its_caller(program):
    line = "poss_jax/model/layers.py:96 < poss_jax/model/target.py:7"
    assert program.source(find(program, "f.1").op) == line
    assert program.source(find(program, "f.3").op) == "poss_jax/model/target.py:7"
    assert program.source(find(program, "r.1").op) == ""


def test_scopes_are_those_of_the_user(program):
    assert findings.cycles_by(program) == {"verify": 100, "-": 30, "draft/level_0": 0}
    assert (
        findings.scope_of("jit(f)/while/body/closed_call/commit/dynamic_update_slice") == "commit"
    )
    assert findings.scope_of("jit(f)/add") == "-"


def test_bytes_are_those_of_the_main_memory(program):
    row, cache = 8 * 2, 64 * 8 * 2
    moved = {place.op.name: findings.moved_bytes(program, place) for place in program.kernels()}
    assert moved["fast"] == cache  # into another memory: read here, not written
    assert moved["f.2"] == row + 4 + row  # updated in place
    assert moved["f.3"] == cache + row + 64 * 2
    assert moved["f.4"] == cache + row + 65 * row
    assert moved["r.1"] == 2 * cache


def test_what_moves_and_what_widens_is_found(program):
    assert names(p for p in program.kernels() if findings.is_relayout(program, p)) == ["f.1", "r.1"]
    assert names(p for p in program.kernels() if findings.is_upcast(program, p)) == ["wide"]
    assert names(p for p in program.kernels() if findings.is_collective(p)) == ["a.1"]
    assert names(findings.copies_of(program, [(8, 64)])) == ["r.1", "f.4", "wide"]
    assert names(findings.copies_of(program, [(8, 63)])) == []


def test_products_sorts_and_scatters_are_found(program):
    assert names(findings.vector_products(program, [(64, 8)])) == ["f.3"]
    assert names(findings.vector_products(program, [(32, 8)])) == []
    assert names(findings.sorts(program, 40)) == ["k"]
    assert names(findings.sorts(program, 41)) == []
    looped = TEXT.replace("body=%body", 'body=%body, metadata={op_name="jit(f)/scatter"}')
    assert names(findings.scatters(program)) == []
    assert names(findings.scatters(hlo.Program(looped))) == ["l"]


def test_a_text_without_a_program_is_refused():
    with pytest.raises(ValueError, match="entry"):
        hlo.Program("HloModule empty")


@pytest.mark.optimised
def test_a_program_of_this_machine_can_be_read():
    def f(x, w):
        with jax.named_scope("verify"):
            return jax.lax.fori_loop(0, 5, lambda _, x: jnp.tanh(x @ w), x)

    compiled = jax.jit(f).lower(jnp.ones((4, 32)), jnp.ones((32, 32))).compile()
    program = hlo.Program(compiled.as_text())
    assert len([*program.loops()]) == 1
    kernels = [place for place in program.kernels() if place.times == 5]
    assert {findings.scope_of(place.op.path) for place in kernels} >= {"verify"}
    assert any("test_hlo.py" in program.source(place.op) for place in kernels)


def test_a_triton_kernel_reads_the_rows_in_use():
    text = """\
ENTRY %main (q: f32[2,8], cache: bf16[2,64,8]) -> f32[2,8] {
  %q = f32[2,8]{1,0} parameter(0)
  %cache = bf16[2,64,8]{2,1,0} parameter(1)
  ROOT %k = f32[2,8]{1,0} custom-call(%q, %cache), custom_call_target="__gpu$xla.gpu.triton"
}
"""
    whole, used = hlo.Program(text), hlo.Program(text, used=(16, 64))
    assert findings.moved_bytes(whole, find(whole, "k")) == 64 + 64 + 2048
    assert findings.moved_bytes(used, find(used, "k")) == 64 + 64 + 512
