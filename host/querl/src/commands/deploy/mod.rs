//! `querl deploy`: writes a folder with everything that a server of the trained rewriters needs.

use crate::args::{Format, one_of};
use crate::new_folder::write_folder;
use crate::terminal;
use anyhow::Context;
use clap::Args;
use clap::builder::TypedValueParser;
use querl_core::fsx::write_atomic;
use querl_pipeline::serving::{BaseFiles, Deployment, ServedRun, write_deployment};
use serde_json::json;
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub(crate) struct DeployArgs {
    /// Finished runs, each of another tenant, on the same base model
    #[arg(value_name = "RUN_DIR", required = true)]
    runs: Vec<PathBuf>,
    /// Where to write: a new or empty folder
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Copy the base model, or leave it out for machines that have it; its digests are checked in both cases
    #[arg(long, value_name = "WHAT", default_value = "copy", value_parser = base_files())]
    base: BaseFiles,
    #[command(flatten)]
    format: Format,
}

/// A clap value parser for `copy` or `reference`: whether the base model is copied.
pub(crate) fn base_files() -> impl TypedValueParser<Value = BaseFiles> {
    one_of([("copy", BaseFiles::Copied, ""), ("reference", BaseFiles::Referenced, "")])
}

/// Templates of the folder's files, whose placeholders such as `@TENANTS@` are replaced.
const FILES: [(&str, &str); 11] = [
    (".dockerignore", include_str!("files/dockerignore")),
    ("Dockerfile", include_str!("files/Dockerfile")),
    ("README.md", include_str!("files/README.md")),
    ("README.zh-CN.md", include_str!("files/README.zh-CN.md")),
    ("compose.yaml", include_str!("files/compose.yaml")),
    ("grafana/datasource.yaml", include_str!("files/grafana/datasource.yaml")),
    ("grafana/provider.yaml", include_str!("files/grafana/provider.yaml")),
    ("grafana/querl.json", include_str!("files/grafana/querl.json")),
    ("keys.env.example", include_str!("files/keys.env.example")),
    ("prometheus.yml", include_str!("files/prometheus.yml")),
    ("querl-rewrite.service", include_str!("files/querl-rewrite.service")),
];

/// Memory that the server needs in addition to the weights, for the KV cache, the program and plugins.
const OTHER_MEMORY_MIB: u64 = 2048;

pub(crate) fn run(args: &DeployArgs) -> anyhow::Result<()> {
    let runs = args.runs.iter().map(|path| ServedRun::in_folder(path)).collect::<anyhow::Result<Vec<_>>>()?;
    let out = &args.out;
    let deployment = write_folder(out, |staging| {
        let deployment = write_deployment(&runs, args.base, staging)?;
        copy_program(staging)?;
        for (name, text) in FILES {
            let path = staging.join(name);
            let text = filled(text, &deployment, args.base, name.contains("zh-CN"));
            write_atomic(&path, text.as_bytes()).with_context(|| format!("{}: cannot be written", path.display()))?;
        }
        Ok(deployment)
    })?;
    let Deployment { tenants, .. } = &deployment;
    args.format.print(&json!({ "out": out, "tenants": tenants }), || {
        let path = out.display();
        format!("{path}: tenants {}; {path}/README.md has the commands\n", tenants.join(", "))
    })?;
    if args.base == BaseFiles::Referenced && deployment.has_base {
        terminal::print(&format!("put the base model at {}/base, or link it there", out.display()));
    }
    Ok(())
}

/// Copies this program to the folder, as `querl`.
fn copy_program(folder: &Path) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("the path of this program is unknown")?;
    let to = folder.join("querl");
    std::fs::copy(&program, &to).map(drop).with_context(|| format!("{}: cannot be copied", program.display()))
}

fn filled(text: &str, deployment: &Deployment, base: BaseFiles, is_chinese: bool) -> String {
    let Deployment { tenants, model_bytes, has_base } = deployment;
    let is_referenced = base == BaseFiles::Referenced && *has_base;
    let base_note = match (is_referenced, is_chinese) {
        (false, _) => "",
        (true, false) => {
            "\nThe base model is not in it. Put it at `base`, or link it there; `sha256sum -c base.sha256` checks it. Docker mounts the folder \
             that the variable `BASE_MODEL` names. For systemd copy it to `/opt/querl/base`, or link that to a folder outside of `/home` and `/root` which \
             all users can read: the service has a user of its own and sees no home folder.\n"
        }
        (true, true) => {
            "\n其中不含基座模型。请把它放到 `base`，或链接到该处；`sha256sum -c base.sha256` 可以校验。Docker 会挂载变量 `BASE_MODEL` 所指的文件夹。\
             使用 systemd 时，请把它复制到 `/opt/querl/base`，或链接到 `/home` 和 `/root` 之外、所有用户可读的文件夹：服务有自己的用户，看不到主目录。\n"
        }
    };
    let base_volume = match is_referenced {
        true => "      - ${BASE_MODEL:?the folder of the base model}:/opt/querl/base:ro\n",
        false => "",
    };
    // Twice the size of the weights: those stored in 16 bits may be converted to 32.
    let memory_mib = (2 * model_bytes).div_ceil(1 << 20) + OTHER_MEMORY_MIB;
    let tenant = tenants.first().map_or("", String::as_str);
    [
        ("@TENANTS@", tenants.iter().map(|tenant| format!("`{tenant}`")).collect::<Vec<_>>().join(", ").as_str()),
        ("@TENANT@", tenant),
        ("@QUERY@", "益生菌怎么吃"),
        ("@BASE_NOTE@", base_note),
        ("@BASE_VOLUME@", base_volume),
        ("@MEMORY_MIB@", &memory_mib.to_string()),
    ]
    .iter()
    .fold(text.to_owned(), |text, (name, value)| text.replace(name, value))
}
