# source launch/activate.sh [launch options]: every later msrun of this shell is a dry run, until `deactivate_dryrun`.
# For bash and zsh. The same as: eval "$(mindspeed-dryrun activate -- OPTIONS)"

if command -v mindspeed-dryrun >/dev/null 2>&1; then
    _mindspeed_dryrun() { mindspeed-dryrun "$@"; }
else
    # a source checkout that is not installed: the package lies beside this folder
    _mindspeed_dryrun_root=$(cd "$(dirname "${BASH_SOURCE[0]:-${(%):-%x}}")/.." && pwd)
    _mindspeed_dryrun() {
        "${PYTHON:-python3}" -c 'import sys; sys.path.insert(0, sys.argv.pop(1)); from mindspeed_dryrun.commands import main; sys.exit(main())' \
            "$_mindspeed_dryrun_root" "$@"
    }
fi

deactivate_dryrun() {
    eval "$(_mindspeed_dryrun deactivate)"
    [ -n "${_mindspeed_dryrun_named:-}" ] && unset -f deactivate
    unset -f _mindspeed_dryrun deactivate_dryrun
    unset _mindspeed_dryrun_root _mindspeed_dryrun_named
}
# `deactivate` for short, unless a virtual environment has one already
if ! typeset -f deactivate >/dev/null; then
    _mindspeed_dryrun_named=1
    deactivate() { deactivate_dryrun; }
fi

if _mindspeed_dryrun_commands=$(_mindspeed_dryrun activate -- "$@"); then
    eval "$_mindspeed_dryrun_commands"
    unset _mindspeed_dryrun_commands
    echo "Every msrun in this shell is a dry run now. \`deactivate_dryrun\` ends it." >&2
else
    [ -n "${_mindspeed_dryrun_named:-}" ] && unset -f deactivate
    unset _mindspeed_dryrun_commands _mindspeed_dryrun_named _mindspeed_dryrun_root
    unset -f _mindspeed_dryrun deactivate_dryrun
    false
fi
