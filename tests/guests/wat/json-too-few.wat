;; Returns JSON with one result for several episodes.
;;! contract 0.2.0
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/rewards@0.1.0;
;;! world export querl:plugin/json-rewards@0.1.0;
(module
  ;;! include memory
  ;;! include describe
  ;;! include check-settings
  ;;! include range
  ;;! include json
  ;; Never called: the host prefers the JSON form.
  (func (export "querl:plugin/rewards@0.1.0#score-batch") (param i32 i32) (result i32)
    (unreachable))
  (data (i32.const 1600) "[{\22scored\22:{\22total\22:0.5,\22components\22:[]}}]")
  (func $odd (result i32)
    (global.set $n_odd_bytes (i32.const 42))
    (i32.const 1600))
)
