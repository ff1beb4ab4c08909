#![allow(clippy::unwrap_used)]

use super::*;
use futures::FutureExt;

fn with_budget(budget: f64) -> Arc<SpendTracker> {
    Arc::new(SpendTracker { budget: Some(budget), ..SpendTracker::default() })
}

async fn begun(account: &Arc<SpendTracker>, most: f64) -> CallSpend {
    let mut call_spend = CallSpend::new(account, "teacher m");
    call_spend.covered_by(account.reserve(most).await.unwrap());
    call_spend.sent();
    call_spend
}

fn answered(mut call_spend: CallSpend, cost: f64) {
    call_spend.answered();
    call_spend.charged(Usage { prompt_tokens: 10, completion_tokens: 2, is_estimated: false, cost: Some(cost) });
}

#[tokio::test]
async fn spending_is_kept_by_stage_over_processes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("calls.json");
    for _ in 0..2 {
        let account = Arc::new(SpendTracker::open(&path, None).unwrap());
        account.begin("rewrite");
        answered(begun(&account, 0.25).await, 0.25);
        account.count_cached("teacher m");
        account.count_joined("teacher m");
        account.save().unwrap();
    }
    let account = SpendTracker::open(&path, None).unwrap();
    let spent = account.of_stage("rewrite");
    assert_eq!((spent.calls, spent.tries, spent.cached, spent.joined), (2, 2, 2, 2));
    assert_eq!((spent.cost, spent.prompt_tokens), (0.5, 20));
    assert_eq!(account.of_stage("eval"), Spend::default());
    std::fs::write(&path, "[]").unwrap();
    assert!(SpendTracker::open(&path, None).unwrap_err().to_string().contains("not a record of spend"));
}

#[tokio::test]
async fn budget_counts_what_was_lost() {
    let account = with_budget(1.0);
    answered(begun(&account, 0.5).await, 0.5);
    assert!(account.reserve(0.0).await.is_ok(), "what costs nothing is not stopped");
    drop(begun(&account, 0.3).await);
    let failure = account.reserve(0.3).await.unwrap_err();
    assert!(failure.kind.is_fatal());
    assert!(failure.message.starts_with("the budget of 1 is spent: 0.5000 was charged, 0.3000 is"), "{failure}");
    let spent = account.of_stage("");
    assert_eq!((spent.calls, spent.failed, spent.lost), (2, 1, 1));
}

/// Regression: a run stopped with budget left, since calls in flight counted at their highest cost.
#[tokio::test]
async fn calls_under_way_are_waited_for_before_the_budget_is_called_spent() {
    let account = with_budget(1.2);
    let (first, second) = (begun(&account, 0.5).await, begun(&account, 0.5).await);
    let mut third = Box::pin(account.reserve(0.5));
    assert!(third.as_mut().now_or_never().is_none());
    answered(first, 0.1);
    let third = third.await.unwrap();
    assert!(account.reserve(0.5).now_or_never().is_none(), "0.1 and twice 0.5 leave less than 0.5");
    drop(third);
    answered(second, 0.5);
    assert_eq!(account.reserve(0.7).await.unwrap_err().kind, FailureKind::OverBudget);
    assert!(account.reserve(0.5).await.is_ok());
}

/// Regression: a call whose attempts were all charged cost several times its reservation.
#[tokio::test]
async fn each_try_that_may_have_been_charged_counts_before_the_next() {
    let account = with_budget(1.0);
    let mut call_spend = begun(&account, 0.4).await;
    call_spend.lost();
    call_spend.covered_by(account.reserve(0.4).await.unwrap());
    call_spend.sent();
    call_spend.lost();
    assert_eq!(account.reserve(0.4).await.unwrap_err().kind, FailureKind::OverBudget);
    call_spend.failed();
    drop(call_spend);
    let spent = account.of_stage("");
    assert_eq!((spent.calls, spent.tries, spent.failed, spent.lost), (1, 2, 1, 2));
}

/// Regression: a run that waits for a batch which is read only after the wait.
#[tokio::test]
async fn what_a_batch_may_cost_is_not_waited_for() {
    let account = with_budget(1.0);
    let batch = account.reserve_for_batch(0.8).unwrap();
    assert_eq!(account.reserve(0.3).now_or_never().unwrap().unwrap_err().kind, FailureKind::OverBudget);
    drop(batch);
    let in_flight = account.reserve(0.3).await.unwrap();
    assert_eq!(account.reserve_for_batch(0.8).unwrap_err().kind, FailureKind::OverBudget);
    drop(in_flight);
    drop(account.hold(7.0));
    assert!(account.reserve(1.0).await.is_ok());
}

/// Regression: the rounding error of reservations counted as calls in flight that never end.
#[tokio::test]
async fn nothing_is_waited_for_where_nothing_is_under_way() {
    let account = with_budget(0.31);
    for _ in 0..1000 {
        let open = [account.reserve(0.1).await.unwrap(), account.reserve(0.2).await.unwrap()];
        drop(open);
    }
    assert!(account.reserve(0.31).now_or_never().unwrap().is_ok());
}
