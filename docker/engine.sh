# shellcheck shell=bash
# To be sourced: which container engine works here.

# The first of the named engines that is there and answers; says what is missing if there is none.
working_engine() {
    local name
    for name in "$@"; do
        if command -v "$name" >/dev/null && "$name" info >/dev/null 2>&1; then
            echo "$name"
            return
        fi
    done
    {
        echo "no container engine works here; looked for: $*"
        for name in "$@"; do
            if command -v "$name" >/dev/null; then
                echo "  $name is installed, but \`$name info\` fails: $("$name" info 2>&1 >/dev/null | tail -n 1)"
            else
                echo "  $name is not installed"
            fi
        done
    } >&2
    return 1
}
