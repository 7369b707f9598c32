# Read by every bash that runs below a capture (BASH_ENV). A script is run to learn its launcher call, not for its effects:
# before each command this
#   - puts our programs first on PATH again (`source venv/bin/activate` puts others there);
#   - calls one of ours where a path names it (`/opt/venv/bin/msrun`);
#   - points redirections that would create or truncate a file at /dev/null.
# bash's own DEBUG trap sees each simple command before its redirections are made; with extdebug it can skip it.
# Redirections of whole blocks ({ …; } > file) come before any trap: noclobber at least keeps a file that is there.
set -T -C

__dryrun_look() {
    shopt -s extdebug   # not at start: bash would look for its debugger
    [[ $PATH == "$__dryrun_bin":* ]] || PATH=$__dryrun_bin:$PATH
    __dryrun_command=$BASH_COMMAND
    case $__dryrun_command in "(("* | "[["* | "for "* | "select "* | "case "*) return 0 ;; esac
    local first=${__dryrun_command%%[[:space:]]*} changed='' REPLY=''
    if [[ $first == */* && -e $__dryrun_bin/${first##*/} ]]; then
        __dryrun_command=${first##*/}${__dryrun_command#"$first"}
        changed=1
    else
        local name
        for name in msrun torchrun; do   # nohup /opt/venv/bin/msrun … (=~ would overwrite the script's BASH_REMATCH)
            if [[ $__dryrun_command == *[[:space:]]*/$name[[:space:]]* ]]; then
                local before=${__dryrun_command%%/$name[[:space:]]*} after=${__dryrun_command#*/$name}
                __dryrun_command="${before%[[:space:]]*} $name$after"
                changed=1
            fi
        done
    fi
    if [[ $__dryrun_command == *">"* ]]; then
        __dryrun_quiet "$__dryrun_command"
        if [[ $REPLY != "$__dryrun_command" ]]; then
            changed=1
            __dryrun_command=$REPLY
            # a file that would be written from a here-document, or the script's own output for good: leave it out
            case $__dryrun_command in *"<<"* | "exec "[\>0-9\&]* | "exec"[\>0-9\&]*) __dryrun_command=: ;; esac
        fi
    fi
    [[ -z $changed ]] && return 0
    # `msrun … > log &` has lost its `&` here; run it as a job, so that `$!` and `wait $!` mean something
    [[ $__dryrun_command == *@(msrun|torchrun|torch.distributed)* && $(type -t -- "$first") != function ]] && __dryrun_command+=$' & wait "$!"'
    return 1
}

# $1 with every redirection to a file pointed at /dev/null → REPLY. Quotes and $( ) are left alone.
__dryrun_quiet() {
    local text=$1 out= char quote= depth=0 i=0 n=${#1} target
    while ((i < n)); do
        char=${text:i:1}
        if [[ -n $quote ]]; then
            [[ $char == "$quote" ]] && quote=
            if [[ $char == \\ && $quote == '"' ]]; then out+=$char; ((++i)); char=${text:i:1}; fi
        elif [[ $char == \\ ]]; then
            out+=$char; ((++i)); char=${text:i:1}
        elif [[ $char == [\'\"] ]]; then
            quote=$char
        elif [[ ${text:i:2} == [\$\<\>]"(" ]]; then
            ((++depth)); out+=$char; ((++i)); char="("
        elif ((depth)) && [[ $char == "(" ]]; then
            ((++depth))
        elif ((depth)) && [[ $char == ")" ]]; then
            ((--depth)) || :
        elif ((depth == 0)) && [[ $char == ">" ]]; then
            local operator=">"
            ((++i))
            while [[ ${text:i:1} == [\>\|\&] ]]; do operator+=${text:i:1}; ((++i)); done
            while [[ ${text:i:1} == [[:blank:]] ]]; do ((++i)); done
            __dryrun_word "${text:i}"
            target=$REPLY
            ((i += ${#target})) || :
            if [[ $operator == ">&" && $target == [0-9-]* || $target == /dev/* ]]; then
                out+=$operator$target
            else
                out+=${operator/#>>/>}
                out=${out%|}
                out+=/dev/null
            fi
            continue
        fi
        out+=$char
        ((++i))
    done
    REPLY=$out
}

# The first shell word of $1 → REPLY.
__dryrun_word() {
    local text=$1 quote= depth=0 i=0 char
    while ((i < ${#text})); do
        char=${text:i:1}
        if [[ -n $quote ]]; then
            [[ $char == "$quote" ]] && quote=
        elif [[ $char == [\'\"] ]]; then
            quote=$char
        elif [[ $char == \\ ]]; then
            ((++i))
        elif [[ $char == "(" ]]; then
            ((++depth))
        elif [[ $char == ")" ]]; then
            ((--depth)) || :
        elif ((depth == 0)) && [[ $char == [[:space:]\;\&\|] ]]; then
            break
        fi
        ((++i))
    done
    REPLY=${text:0:i}
}

kill() { :; }   # a builtin, so PATH cannot stand in for it

[[ -n ${__dryrun_user_env:-} && -r ${__dryrun_user_env:-} ]] && . "$__dryrun_user_env"
# `!` on both sides: a status other than 0 must not end a script that runs under `set -e`
trap '__dryrun_look || { eval "$__dryrun_command" || :; ! :; }' DEBUG
