# source launch/activate.sh [launch options]: every later msrun of this shell is a dry run, until `dryrun_off`.
# For bash and zsh. The same as: eval "$(mindspeed-dryrun activate -- OPTIONS)"

if command -v mindspeed-dryrun >/dev/null 2>&1; then
    _mindspeed_dryrun_commands=$(mindspeed-dryrun activate -- "$@")
else
    # a source checkout that is not installed: the package lies beside this folder
    _mindspeed_dryrun_commands=$(
        root=$(cd "$(dirname "${BASH_SOURCE[0]:-${(%):-%x}}")/.." && pwd)
        "${PYTHON:-python3}" -c 'import sys; sys.path.insert(0, sys.argv.pop(1)); from mindspeed_dryrun.commands import main; sys.exit(main())' \
            "$root" activate -- "$@"
    )
fi
# Not by `$?`: under `set -e` a failure ends the shell above, as it should.
if [ -n "$_mindspeed_dryrun_commands" ]; then
    eval "$_mindspeed_dryrun_commands"
    unset _mindspeed_dryrun_commands
    echo "Every msrun in this shell is a dry run now. \`dryrun_off\` ends it." >&2
else
    unset _mindspeed_dryrun_commands
    false
fi
