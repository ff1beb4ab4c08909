;; Scores the first episode of a group 0.25 and all others 0.5: results depend on the order of the group.
;;! contract 0.2.0
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/group-rewards@0.1.0;
(module
  ;;! include memory
  ;;! include describe
  ;;! include check-settings
  ;;! include range
  ;;! include scores-by-place
)
