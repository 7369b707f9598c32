# Read by every bash that runs below a capture (BASH_ENV). A script is run to learn its launcher call, not for its effects:
# before each command this
#   - puts our programs first on PATH again (`source venv/bin/activate` puts others there);
#   - calls one of ours where a path names it (`/opt/venv/bin/msrun`);
#   - points redirections that would create or truncate a file at /dev/null;
#   - leaves out `source` of files that set up another machine and are not on this one.
# bash's own DEBUG trap sees each simple command before its redirections are made; with extdebug it can skip it.
# Redirections of whole blocks ({ …; } > file) come before any trap: noclobber at least keeps a file that is there.
# Every name of ours starts with __dryrun: words of the script are expanded below, and must see the script's variables.
set -T -C
: & wait "$!"   # `$!` has a value: a command that is run from the trap has lost its `&`

# The caller's positional parameters are the arguments.
__dryrun_look() {
    shopt -s extdebug   # not at start: bash would look for its debugger
    [[ $PATH == "$__dryrun_bin":* ]] || PATH=$__dryrun_bin:$PATH
    case ${FUNCNAME[1]:-} in __dryrun_* | cd | pushd | kill | ulimit | trap | msrun | torchrun | command_not_found_handle) return 0 ;; esac
    ((BASH_SUBSHELL)) || __dryrun_options=$-
    [[ -n $__dryrun_sets ]] && __dryrun_keep_set
    __dryrun_command=$BASH_COMMAND
    case $__dryrun_command in "(("* | "[["* | "for "* | "select "* | "case "*) return 0 ;; esac
    local __dryrun_before='' __dryrun_raw='' __dryrun_after='' __dryrun_changed='' REPLY=''
    __dryrun_split "$__dryrun_command"
    while [[ $__dryrun_raw == @(exec|command|builtin) && $__dryrun_after == " "[!-\<\>\&0-9]* ]]; do
        local __dryrun_prefix="$__dryrun_before$__dryrun_raw "
        __dryrun_split "${__dryrun_after# }"
        __dryrun_before=$__dryrun_prefix$__dryrun_before
    done
    case $__dryrun_raw in
    '' ) ;;
    source | .) __dryrun_source "$@" ;;
    *) __dryrun_stand_in "$@" ;;
    esac
    local __dryrun_targets=''
    if [[ $__dryrun_command == *">"* ]]; then
        __dryrun_quiet "$__dryrun_command" "$@"
        if [[ $REPLY != "$__dryrun_command" || $__dryrun_command == "exec "*">("* ]]; then
            __dryrun_changed=1
            __dryrun_command=$REPLY
            # a file that would be written from a here-document, or the script's own output for good: leave it out
            case $__dryrun_command in *"<<"*) [[ -z $__dryrun_targets ]] || __dryrun_command=: ;;
            "exec "[\>12\&]* | "exec"[\>12\&]*) __dryrun_command=: ;; esac
        fi
    fi
    [[ -z $__dryrun_written || $__dryrun_command == : ]] || __dryrun_reread "$@"
    __dryrun_written+=$__dryrun_targets
    [[ -z $__dryrun_changed ]]
}

# `--set` of a variable that a sourced file assigns: it has the wanted value again before the next command.
__dryrun_keep_set() {
    local IFS=' ' __dryrun_name __dryrun_value
    for __dryrun_name in $__dryrun_sets; do
        __dryrun_value=__dryrun_set_$__dryrun_name
        if [[ -n ${!__dryrun_name+x} && ${!__dryrun_name} != "${!__dryrun_value}" ]]; then
            printf -v "$__dryrun_name" %s "${!__dryrun_value}" && printf '%s\n' "$__dryrun_name" >> "$__dryrun_bin/../set"
        fi
    done
}

# A simple command → what stands before its command word (assignments), that word as it is written, and the rest.
__dryrun_split() {
    __dryrun_before='' __dryrun_raw='' __dryrun_after=$1
    while [[ -n $__dryrun_after ]]; do
        __dryrun_word "$__dryrun_after"
        if [[ $REPLY != [A-Za-z_]*([A-Za-z0-9_])?(\[*\])?(+)=* ]]; then   # not =~: BASH_REMATCH is the script's
            __dryrun_raw=$REPLY
            __dryrun_after=${__dryrun_after:${#REPLY}}
            return
        fi
        __dryrun_before+="$REPLY "
        __dryrun_after=${__dryrun_after:${#REPLY}}
        __dryrun_after=${__dryrun_after# }
    done
}

# Where the command word is a path whose last part is a program of ours, that path becomes a function that calls ours: the
# command itself stays as it is. Functions cannot have names that need quotes, and exec and command see no functions:
# there the word is replaced.
# A script whose own first line asks for sh is given to bash in the same way: dash does not read BASH_ENV.
__dryrun_stand_in() {
    [[ $__dryrun_raw == *[/\$\`]* ]] || return 0
    __dryrun_expand "$__dryrun_raw" "$@"
    local __dryrun_name=${REPLY##*/} __dryrun_line=''
    [[ $REPLY == */* && -n $__dryrun_name && $REPLY != "$__dryrun_bin"/* ]] || return 0
    if [[ ! -e $__dryrun_bin/$__dryrun_name ]]; then
        [[ -f $REPLY && -x $REPLY ]] && IFS= read -rn 80 __dryrun_line 2>/dev/null < "$REPLY"
        [[ $__dryrun_line == "#!"*[/\ ]@(sh|dash)?([[:space:]]*) ]] || return 0
        __dryrun_name="bash ${REPLY@Q}"
    fi
    if [[ $__dryrun_before != *@(exec|command|builtin)" " && $REPLY == +([A-Za-z0-9_./+,:@%-]) ]]; then
        eval "function $REPLY { $__dryrun_bin/$__dryrun_name \"\$@\"; }"
    else
        __dryrun_command="$__dryrun_before$__dryrun_bin/$__dryrun_name$__dryrun_after"
        __dryrun_changed=1
    fi
}

# `source FILE` where FILE sets up CANN, an environment or a login shell, and is not here: the machine of the training has it.
# Scripts under `set -u` go on to use what it defines; unexported, so that no rank takes it for an installed CANN.
__dryrun_source() {
    __dryrun_word "${__dryrun_after# }"
    __dryrun_expand "$REPLY" "$@"
    [[ $REPLY == */* && ! -e $REPLY ]] || return 0
    case $REPLY in
    */[Aa]scend*/* | */CANN/* | */cann/* | */nnal/* | */set_env.sh | */setenv.bash | */setenv.sh | */set_env.bash) ;;
    */bin/activate | */conda.sh | */.bashrc | */.bash_profile | */.profile | /etc/profile* | /etc/bashrc | */modules/init/*) ;;
    *) return 0 ;;
    esac
    __dryrun_absent "source $REPLY"
    local __dryrun_cann=/usr/local/Ascend/ascend-toolkit/latest
    __dryrun_command=": \"\${ASCEND_TOOLKIT_HOME=$__dryrun_cann}\" \"\${ASCEND_HOME_PATH=$__dryrun_cann}\" \
        \"\${ASCEND_OPP_PATH=$__dryrun_cann/opp}\" \"\${ASCEND_AICPU_PATH=$__dryrun_cann}\" \
        \"\${LD_LIBRARY_PATH=}\" \"\${PYTHONPATH=}\""
    __dryrun_changed=1
}

# A value that is read from a file that the script should have written just before is not the value of the real run: it is
# noted, and what is read from a file of an earlier run as well.
__dryrun_reread() {
    [[ $__dryrun_raw == @(source|.|bash|sh|cat|wc|head|grep|awk|sed|sort|cut|jq|read|mapfile|readarray|*/*) ]] || return 0
    [[ ! -s $__dryrun_bin/../calls ]] || return 0
    local IFS=$'\n' __dryrun_target __dryrun_text
    __dryrun_text=" ${__dryrun_command%%$'\n'*} "
    __dryrun_text=${__dryrun_text//[\"\'\<]/ }
    for __dryrun_target in $__dryrun_written; do
        [[ $__dryrun_text == *" ${__dryrun_target//[\"\']/} "* ]] || continue
        __dryrun_expand "$__dryrun_target" "$@"
        if [[ -e $REPLY ]]; then printf '%s\n' "$REPLY" >> "$__dryrun_bin/../stale"; else printf '%s\n' "$REPLY" >> "$__dryrun_bin/../lost"; fi
    done
}

# Notes what is not on this machine and was taken to be on that of the training.
__dryrun_absent() { printf '%s\n' "$1" >> "$__dryrun_bin/../absent"; }

# What the first word of $1 becomes, with the rest of our arguments as positional parameters → REPLY. In a subshell:
# `${X:=1}` must not be assigned twice.
__dryrun_expand() {
    REPLY=$(
        builtin trap - DEBUG
        set +eux
        __dryrun_raw=$1
        shift
        { eval "set -- $__dryrun_raw"; } 2>/dev/null
        printf '%s' "$1"
    )
}

# $1 with every redirection to a file pointed at /dev/null → REPLY, and the files' names → __dryrun_targets. Quotes, $( ) and the
# text of here-documents are left alone, and files of `mktemp`, which are in our temporary folder.
__dryrun_quiet() {
    local __dryrun_text=$1 __dryrun_out= __dryrun_char= __dryrun_quote= __dryrun_depth=0 __dryrun_at=0 __dryrun_operator=
    shift
    while ((__dryrun_at < ${#__dryrun_text})); do
        __dryrun_char=${__dryrun_text:__dryrun_at:1}
        if [[ -n $__dryrun_quote ]]; then
            [[ $__dryrun_char == "$__dryrun_quote" ]] && __dryrun_quote=
            if [[ $__dryrun_char == \\ && $__dryrun_quote == '"' ]]; then
                __dryrun_out+=$__dryrun_char; ((++__dryrun_at)); __dryrun_char=${__dryrun_text:__dryrun_at:1}
            fi
        elif [[ $__dryrun_char == \\ ]]; then
            __dryrun_out+=$__dryrun_char; ((++__dryrun_at)); __dryrun_char=${__dryrun_text:__dryrun_at:1}
        elif [[ $__dryrun_char == [\'\"] ]]; then
            __dryrun_quote=$__dryrun_char
        elif [[ ${__dryrun_text:__dryrun_at:2} == [\$\<\>]"(" ]]; then
            ((++__dryrun_depth)); __dryrun_out+=$__dryrun_char; ((++__dryrun_at)); __dryrun_char="("
        elif ((__dryrun_depth)) && [[ $__dryrun_char == "(" ]]; then
            ((++__dryrun_depth))
        elif ((__dryrun_depth)) && [[ $__dryrun_char == ")" ]]; then
            ((--__dryrun_depth)) || :
        elif ((__dryrun_depth == 0)) && [[ $__dryrun_char == $'\n' ]]; then
            __dryrun_out+=${__dryrun_text:__dryrun_at}   # here-documents
            break
        elif ((__dryrun_depth == 0)) && [[ $__dryrun_char == ">" ]]; then
            __dryrun_operator=">"
            ((++__dryrun_at))
            while [[ ${__dryrun_text:__dryrun_at:1} == [\>\|\&] ]]; do __dryrun_operator+=${__dryrun_text:__dryrun_at:1}; ((++__dryrun_at)); done
            while [[ ${__dryrun_text:__dryrun_at:1} == [[:blank:]] ]]; do ((++__dryrun_at)); done
            if [[ ${__dryrun_text:__dryrun_at:2} == [\<\>]"(" ]]; then   # a process, not a file
                __dryrun_out+="$__dryrun_operator "
                continue
            fi
            __dryrun_word "${__dryrun_text:__dryrun_at}"
            ((__dryrun_at += ${#REPLY})) || :
            __dryrun_target "$@"
            continue
        fi
        __dryrun_out+=$__dryrun_char
        ((++__dryrun_at))
    done
    REPLY=$__dryrun_out
}

# The redirection of __dryrun_operator into $REPLY → __dryrun_out.
__dryrun_target() {
    local __dryrun_raw_target=$REPLY
    if [[ $__dryrun_operator == ">&" && $REPLY == [0-9-]* || $REPLY == /dev/* ]]; then
        __dryrun_out+=$__dryrun_operator$REPLY
        return
    fi
    if [[ $REPLY == *[\$/\`]* ]]; then
        __dryrun_expand "$REPLY" "$@"
        if [[ $REPLY == "$TMPDIR"/* && $REPLY != */../* && $__dryrun_operator != ">&" ]]; then
            __dryrun_make "${REPLY%/*}"
            __dryrun_out+=${__dryrun_operator/%[!\>]*/}   # `&>` has its `&` in __dryrun_out already
            [[ $__dryrun_operator == ">>" || $__dryrun_out == *"&>" ]] || __dryrun_out+="|"   # noclobber is ours
            __dryrun_out+=$__dryrun_raw_target
            return
        fi
    fi
    __dryrun_targets+=$__dryrun_raw_target$'\n'
    __dryrun_out+=${__dryrun_operator/#>>/>}
    __dryrun_out=${__dryrun_out%|}/dev/null
}

# The first shell word of $1, as it is written → REPLY.
__dryrun_word() {
    local text=$1 quote= depth=0 i=0 char
    while ((i < ${#text})); do
        char=${text:i:1}
        if [[ $char == \\ && $quote != "'" ]]; then
            ((++i))
        elif [[ -n $quote ]]; then
            [[ $char == "$quote" ]] && quote=
        elif [[ $char == [\'\"\`] ]]; then
            quote=$char
        elif [[ $char == "(" || ${text:i:2} == '${' ]]; then
            ((++depth))
            [[ $char == "(" ]] || ((++i))
        elif ((depth)) && [[ $char == [\)\}] ]]; then
            ((--depth)) || :
        elif ((depth == 0)) && [[ $char == [[:space:]\;\&\|\<\>] ]]; then
            break
        fi
        ((++i))
    done
    REPLY=${text:0:i}
}

# In a subshell: bash would remember where mkdir is, and take that one for the script's.
__dryrun_make() ( command -p mkdir -p "$1" )

# A folder that is not here (a data set's, upstream's) is taken to be there: an empty one below $__dryrun_places, which is cut
# from every path of the launcher call afterwards.
cd() {
    builtin cd "$@" 2>/dev/null && return
    local __dryrun_folder="${!#}"
    if (($# == 0)) || [[ -z $__dryrun_folder || $__dryrun_folder == -* || -e $__dryrun_folder ]]; then
        builtin cd "$@"
        return
    fi
    __dryrun_absent "cd $__dryrun_folder"
    [[ $__dryrun_folder == /* ]] || __dryrun_folder=$PWD/$__dryrun_folder
    __dryrun_folder=$__dryrun_places${__dryrun_folder#"$__dryrun_places"}
    __dryrun_make "$__dryrun_folder" && builtin cd "$__dryrun_folder"
}
pushd() { builtin pushd . && cd "$@"; }

# Under `set -e` a program that is not here would end the script. One that starts a program of ours is left out.
command_not_found_handle() {
    __dryrun_absent "$1"
    case " $* " in *[\ /]msrun" "* | *[\ /]torchrun" "*)
        "$__dryrun_bin/__dryrun_starter" "${@:2}"
        return
        ;;
    esac
    [[ ${__dryrun_options:-} == *e* && $1 != *-smi ]] && return 0
    echo "$1: command not found" >&2
    return 127
}

# Handlers run when a script ends or fails, too late for its call, and in them BASH_COMMAND is not the command that runs.
trap() { :; }
ulimit() { builtin ulimit "$@" 2>/dev/null || :; }   # this machine may allow less
kill() { :; }   # a builtin, so PATH cannot stand in for it
msrun() { "$__dryrun_bin/msrun" "$@"; }   # `PATH=/opt/venv/bin:$PATH msrun …` would find another one
torchrun() { "$__dryrun_bin/torchrun" "$@"; }

[[ -n ${__dryrun_user_env:-} && -r ${__dryrun_user_env:-} ]] && . "$__dryrun_user_env"
# `!` on both sides: a status other than 0 must not end a script that runs under `set -e`
__dryrun_written=''
builtin trap '__dryrun_look "$@" || { eval "$__dryrun_command" || :; ! :; }' DEBUG
