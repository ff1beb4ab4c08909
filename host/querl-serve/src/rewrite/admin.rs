//! The routes `/admin/tenants`: lists, loads, replaces and removes tenants while the service runs.

use super::candidates::check_not_followed;
use super::service::{Call, RewriteService, unknown_tenant};
use crate::error::{ErrorForm, ErrorResponse, json_response};
use crate::key::unauthorized;
use axum::Json;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use querl_core::serving::{Role, Tenant};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;

pub(super) async fn check_key(State(service): State<Arc<RewriteService>>, request: Request, next: Next) -> Response {
    let error = match &service.admin_key {
        Some(key) if key.is_in(request.headers()) => return next.run(request).await,
        Some(_) => unauthorized(request.headers()),
        None => {
            let what = "the admin routes are disabled; start the server with --admin_key_env NAME to enable them";
            ErrorResponse::new(StatusCode::FORBIDDEN, what)
        }
    };
    error.into_body(ErrorForm::OpenAi)
}

fn body(tenant: &Tenant) -> Value {
    let Tenant { name, version, source, loaded_at, api_key, .. } = tenant;
    json!({
        "name": name, "version": version, "source": source, "loaded_at": loaded_at, "has_own_key": api_key.is_some(),
    })
}

pub(super) async fn list(State(service): State<Arc<RewriteService>>) -> Response {
    let tenants = service.rewriter().map(|rewriter| rewriter.tenants().iter().map(body).collect::<Vec<_>>());
    json_response(tenants.map(|tenants| json!({"tenants": tenants})), ErrorForm::OpenAi)
}

/// Loads the run or configuration at `path`. Loading is completed even if the client leaves.
pub(super) async fn load(mut call: Call) -> Result<Response, ErrorResponse> {
    check_not_followed(&call.service)?;
    let path: PathBuf = call.fields.take_required("path", "the path of a configuration or a run on the server")?;
    let (service, rewriter) = (call.service.clone(), call.rewriter.clone());
    let loading = tokio::spawn(async move {
        let _one_at_a_time = service.loading.lock().await;
        tokio::task::spawn_blocking(move || rewriter.load(&path, Role::Current)).await
    });
    let failed = |_| ErrorResponse::internal("loading panicked; the server's log says why");
    let tenant = loading.await.and_then(|loaded| loaded).map_err(failed)?.map_err(ErrorResponse::value)?;
    call.record.note_tenant(&tenant.name);
    tracing::info!("tenant {}: loaded version {} from {}", tenant.name, tenant.version, tenant.source);
    Ok(Json(body(&tenant)).into_response())
}

pub(super) async fn remove(State(service): State<Arc<RewriteService>>, Path(name): Path<String>) -> Response {
    let remove = || {
        let rewriter = service.rewriter()?;
        check_not_followed(&service)?;
        if !rewriter.remove(&name, Role::Current) {
            return Err(unknown_tenant("tenant", &name, "here", &rewriter.tenants()));
        }
        tracing::info!("tenant {name}: removed");
        Ok(json!({"removed": name}))
    };
    json_response(remove(), ErrorForm::OpenAi)
}
