# Sourced inside a job (profiles/slurm): puts the environment for this node's architecture first on PATH.
#
# The login node may be x86_64 and the compute nodes aarch64 (GH200), with one shared folder. Make one environment on each
# kind of node, `python3 -m venv .venv-$(uname -m)`, with the same versions; a conda environment that is active where
# Snakemake runs does for nodes of the same architecture. What is found must start here and hold Snakemake.
node_env_found=
for node_env in "$PWD/.venv-$(uname -m)/bin" "" "$PWD/.venv/bin"; do
    if "${node_env:+$node_env/}python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("snakemake"))' 2>/dev/null; then
        PATH="${node_env:+$node_env:}$PATH"
        export PATH
        node_env_found=yes
        break
    fi
done
if [ -z "$node_env_found" ]; then
    echo "envs/node-env.sh: found no environment that starts on $(uname -n) ($(uname -m)): make .venv-$(uname -m) on such" \
        "a node, with the pins of envs/cuda.txt or envs/cpu.txt and this package (docs/slurm.md)" >&2
    exit 1
fi
unset node_env node_env_found
