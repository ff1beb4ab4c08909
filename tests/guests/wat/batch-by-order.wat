;; Scores the first episode of a batch 0.25 and the others 0.5, whatever they are.
;;! contract 0.2.0
(module
  ;;! include memory
  ;;! include describe
  ;;! include check-settings
  ;;! include range
  ;;! include scores-by-place
)
