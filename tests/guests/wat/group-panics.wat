;; Traps if a query of the group starts with an ASCII letter.
;;! contract 0.2.0
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/group-rewards@0.1.0;
(module
  ;;! include memory
  ;;! include describe
  ;;! include check-settings
  ;;! include range
  ;;! include scores
  (func $odd (param i32)
    (unreachable))
)
