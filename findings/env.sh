# Sourced by every script of this folder.
#   packages NAME==VERSION...   Make an environment in a temporary folder, or at FINDINGS_ENV, which other scripts share.
#                               Another torch than 2.13.0 gets its own, beside it.
#   run [RANKS]                 Run the Python program on stdin there, on gloo ranks if a number is given.
#   compare                     Compare what the programs printed with the lines below "# Seen:" of the script.
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore

packages() {
  venv=$(realpath -m "${FINDINGS_ENV:-$folder/env}")
  [ "$1" = torch==2.13.0 ] || venv=$venv-${1#torch==}
  [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check "$@"
}

run() {
  cat > "$folder/program.py"
  local command=("$venv/bin/python")
  [ $# -eq 0 ] || command+=(-m torch.distributed.run --standalone --nproc-per-node "$1")
  (cd "$folder" && timeout 120 "${command[@]}" program.py >> seen 2> errors) || {
    cat "$folder/errors" >&2
    exit 1
  }
}

compare() {
  sed -n '/^# Seen:/,/^[^#]/s/^#   //p' "$0" | diff - "$folder/seen" || {
    echo "$(basename "$0"): the output changed; < is recorded, > is new" >&2
    exit 1
  }
  echo "$(basename "$0"): as recorded"
}
