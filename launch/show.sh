# Sourced by the scripts of this folder.
# shellcheck shell=bash

# Prints a command so that it can be pasted into a shell: words are quoted only where they must be.
show() {
  local word line=()
  for word in "$@"; do
    if [[ $word =~ ^[A-Za-z0-9_./:=,@%+~-]+$ ]]; then
      line+=("$word")
    else
      line+=("${word@Q}")
    fi
  done
  echo "${line[*]}"
}

# Prints the comment at the head of the script $1 and ends.
usage() {
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$1" >&2
  exit 2
}
