# Sourced by the recipes that make a Debian system: how it is made, from the package sources of this machine. Needs mmdebstrap,
# and as another user than root also user namespaces (uidmap).
# shellcheck shell=bash

# bootstrap TAR VARIANT PACKAGES [OPTION...]: a system of the release that the machine runs, with these packages, and
# mmdebstrap's further options.
bootstrap() {
    local tar=$1 variant=$2 packages=$3 sources suite path thin=()
    shift 3
    # Suites of Debian itself: what else the machine has, it has for itself.
    # shellcheck disable=SC2016 # apt fills these in
    sources=$(apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' \
        'Identifier: Packages' 'Origin: Debian' 'Architecture: amd64')
    if [ -z "$sources" ]; then
        echo "${0##*/}: apt has no package lists of Debian here; run: apt-get update" >&2
        return 1
    fi
    # The release is the one that the machine runs; its updates come with it.
    suite=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
    # Documents and translations are of no use to a program; licences stay.
    for path in doc man info locale lintian; do
        thin+=(--dpkgopt="path-exclude=/usr/share/$path/*")
    done
    thin+=(--dpkgopt='path-include=/usr/share/doc/*/copyright')
    echo "${0##*/}: making a Debian $suite system; this takes a minute or two" >&2
    mmdebstrap --quiet --variant="$variant" "${thin[@]}" --include="$packages" "$@" "$suite" "$tar.new.tar" - <<<"$sources"
    mv "$tar.new.tar" "$tar"
}
