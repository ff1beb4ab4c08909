;; Scores the first episode of a batch 0.25 and all others 0.5: results depend on the order of the batch.
;;! contract 0.2.0
(module
  ;;! include memory
  ;;! include describe
  ;;! include check-settings
  ;;! include range
  ;;! include scores-by-place
)
