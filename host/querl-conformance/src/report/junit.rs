//! The report for continuous integration.

use super::{Check, Outcome, Report};
use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestSuite};

pub(super) fn render(report: &Report) -> String {
    let mut document = quick_junit::Report::new(format!("querl plugin test {}", report.title()));
    let mut groups: Vec<&str> = Vec::new();
    for check in &report.checks {
        if !groups.contains(&check.group()) {
            groups.push(check.group());
        }
    }
    for group in groups {
        let mut suite = TestSuite::new(format!("{}.{group}", report.plugin));
        let checks = report.checks.iter().filter(|check| check.group() == group);
        suite.add_test_cases(checks.map(|check| case(report, check)));
        document.add_test_suite(suite);
    }
    document.to_string().expect("a report in memory has nothing to fail on")
}

fn case(report: &Report, check: &Check) -> TestCase {
    let mut status = match &check.outcome {
        Outcome::Passed => TestCaseStatus::success(),
        Outcome::Failed(_) => TestCaseStatus::non_success(NonSuccessKind::Failure),
        Outcome::Skipped { .. } => TestCaseStatus::skipped(),
    };
    match &check.outcome {
        Outcome::Passed => {}
        Outcome::Failed(failure) => {
            let whole =
                format!("sent: {}\nreturned: {}\ncontract: {}", failure.sent, failure.returned, failure.expected);
            status.set_message(failure.returned.as_str()).set_type(check.name.as_str()).set_description(whole);
        }
        Outcome::Skipped { why } => {
            status.set_message(why.as_str());
        }
    }
    let mut case = TestCase::new(check.name.as_str(), status);
    case.set_classname(format!("{}.{}", report.plugin, check.group()));
    case
}
